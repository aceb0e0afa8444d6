//! The memory that a run may use.

use std::str::FromStr;

use crate::calibrate::Residence;
use crate::model::Model;
use crate::recipe::Plan;
use crate::system::available_memory;
use crate::{Error, Result};

const DEFAULT_FRACTION: f64 = 0.8;

/// How much memory a run may use. It decides where hidden states are kept, never what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum MemoryBudget {
    /// 80 % of the available memory.
    #[default]
    Auto,
    /// This many bytes, even if less memory is available.
    Bytes(u64),
}

impl FromStr for MemoryBudget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let unknown = || {
            Error::usage(
                format!("invalid memory budget `{text}`: it must be a size of at least 1 MiB, or `auto`"),
                "use a number with a unit, such as 8GiB or 900MiB",
            )
        };
        let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(unknown)?;
        let (number, unit) = text.split_at(unit_at);
        let number: f64 = number.trim().parse().map_err(|_| unknown())?;
        let unit: f64 = match unit.to_ascii_lowercase().as_str() {
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1024.0_f64.powi(2),
            "g" | "gib" => 1024.0_f64.powi(3),
            "t" | "tib" => 1024.0_f64.powi(4),
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            _ => return Err(unknown()),
        };
        let bytes = number * unit;
        match bytes.is_finite() && bytes >= f64::from(1 << 20) {
            true => Ok(Self::Bytes(bytes as u64)),
            false => Err(unknown()),
        }
    }
}

/// Decides where a run of these plans keeps hidden states, and returns a note for the user if that is not in memory.
///
/// # Errors
/// [`Error::MemoryBudget`] if the run needs more than the budget, or than is available, with the smallest budget that
/// suffices.
pub fn residence(
    plans: &[Plan],
    model: &Model,
    budget: MemoryBudget,
    keeps_maxima: bool,
) -> Result<(Residence, Option<String>)> {
    let (budget, limit) = match budget {
        MemoryBudget::Bytes(bytes) => (bytes, Limit::Budget(bytes)),
        MemoryBudget::Auto => match available_memory() {
            Some(available) => ((available as f64 * DEFAULT_FRACTION) as u64, Limit::Available(available)),
            // The available memory of this machine is unknown.
            None => return Ok((Residence::Memory, None)),
        },
    };
    let threads = Some(Plan::thread_memory(plans));
    let residence = match (Plan::residence(plans, model, budget, keeps_maxima), limit) {
        (Ok(residence), _) => residence,
        // A run that needs nearly all of the memory may still succeed.
        (Err(needed), Limit::Available(available)) if needed <= available => {
            Plan::residence(plans, model, needed, keeps_maxima).unwrap_or_default()
        }
        (Err(needed), Limit::Budget(budget)) => {
            return Err(Error::MemoryBudget { needed, budget: Some(budget), available: None, threads });
        }
        (Err(needed), Limit::Available(available)) => {
            return Err(Error::MemoryBudget { needed, budget: None, available: Some(available), threads });
        }
    };
    let note = (residence != Residence::Memory).then(|| {
        note(Plan::scratch_bytes(plans, model, residence), Plan::peak_memory(plans, model), residence)
    });
    Ok((residence, note))
}

/// `scratch` is the disk space for hidden states. Also returns a note for the user if they are not in memory.
pub(super) fn residence_by(
    peak: impl Fn(Residence) -> u64,
    scratch: u64,
    budget: MemoryBudget,
) -> Result<(Residence, Option<String>)> {
    let (limit, most) = match budget {
        MemoryBudget::Bytes(bytes) => (bytes, bytes),
        MemoryBudget::Auto => match available_memory() {
            // A run that needs nearly all of the memory may still succeed.
            Some(available) => ((available as f64 * DEFAULT_FRACTION) as u64, available),
            None => return Ok((Residence::Memory, None)),
        },
    };
    let files = Residence::Files { round_bytes: 0, experts_apart: false };
    let in_memory = peak(Residence::Memory);
    if in_memory <= limit {
        return Ok((Residence::Memory, None));
    }
    let needed = peak(files).min(in_memory);
    if needed > most {
        let given = matches!(budget, MemoryBudget::Bytes(_));
        let [budget, available] = [given, !given].map(|is| is.then_some(most));
        return Err(Error::MemoryBudget { needed, budget, available, threads: None });
    }
    match peak(files) < in_memory {
        // The rest of the budget is for rounds of searches.
        true => {
            let round_bytes = limit.saturating_sub(needed);
            let files = Residence::Files { round_bytes, experts_apart: false };
            Ok((files, Some(note(scratch, in_memory, files))))
        }
        false => Ok((Residence::Memory, None)),
    }
}

fn note(scratch: u64, in_memory: u64, residence: Residence) -> String {
    let experts = match residence {
        Residence::Files { experts_apart: true, .. } => ", and searches and passes read one expert at a time",
        _ => "",
    };
    format!(
        "hidden states are kept in files ({} of disk space){experts}: the run would need {} of memory otherwise",
        super::bytes(scratch),
        super::bytes(in_memory),
    )
}

enum Limit {
    Budget(u64),
    Available(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_have_units() {
        let bytes = |text: &str| match text.parse::<MemoryBudget>() {
            Ok(MemoryBudget::Bytes(bytes)) => Some(bytes),
            _ => None,
        };
        assert_eq!("auto".parse::<MemoryBudget>().unwrap(), MemoryBudget::Auto);
        assert_eq!(bytes("8GiB"), Some(8 << 30));
        assert_eq!(bytes("8G"), Some(8 << 30));
        assert_eq!(bytes("1.5 GB"), Some(1_500_000_000));
        assert_eq!(bytes("900mib"), Some(900 << 20));
        for text in
            ["", "8", "GiB", "-1GiB", "8 gallons", "1KiB", "infGiB", "nanGiB", "1e400GiB", "Auto", "8GiB "]
        {
            let error = text.parse::<MemoryBudget>().unwrap_err();
            assert_eq!(error.category().exit_code(), 2, "{text}");
        }
    }
}

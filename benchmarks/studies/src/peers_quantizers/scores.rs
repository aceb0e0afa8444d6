//! Scores of checkpoints on the same windows, and the comparison of two checkpoints over many rows.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;

use super::contests::{How, Metric};
use crate::support::rows::Row;

/// Maximum amount by which quant may be worse than the other: a share of the other's KL, or for perplexity a difference
/// in nats.
const TOLERANCE: f64 = 0.005;
/// The difference may always be up to this many of its standard errors.
const ERRORS: f64 = 2.0;

/// The scores from one selection of calibration windows.
#[derive(Clone)]
pub struct Draw {
    pub kl: Vec<f64>,
    pub nll: Vec<f64>,
}

/// The scores that `quant eval` reports for a checkpoint compared with the float model; for several selections of
/// calibration windows, their mean.
pub struct Scores {
    /// Each window's mean KL.
    pub kl: Vec<f64>,
    /// Each window's mean negative log-likelihood.
    pub nll: Vec<f64>,
    pub kl_mean: f64,
    pub kl_error: f64,
    pub perplexity: f64,
    /// Scored tokens per window.
    pub tokens: f64,
    /// The digest of the scored tokens.
    pub sha256: String,
    /// The scores of each selection.
    pub draws: Vec<Draw>,
}

impl Scores {
    /// Parses the output of `quant eval --json`.
    pub fn from_json(result: &Value) -> Result<Self> {
        let missing = |path: &str| format!("`quant eval --json` reports no {path}");
        let number = |path: &str| {
            let value = result.pointer(path).and_then(Value::as_f64);
            value.with_context(|| missing(path))
        };
        let numbers = |path: &str| -> Result<Vec<f64>> {
            let values = result.pointer(path).and_then(Value::as_array).with_context(|| missing(path))?;
            values.iter().map(|w| w.as_f64().with_context(|| missing(path))).collect()
        };
        let kl = numbers("/comparison/window_kl")?;
        let sha256 = result.pointer("/tokens_sha256").and_then(Value::as_str);
        let nll = numbers("/window_nll")?;
        Ok(Self {
            draws: vec![Draw { kl: kl.clone(), nll: nll.clone() }],
            nll,
            kl_mean: number("/comparison/kl/mean")?,
            kl_error: number("/comparison/kl/standard_error")?,
            perplexity: number("/perplexity/mean")?,
            tokens: number("/tokens_scored")? / kl.len() as f64,
            sha256: sha256.with_context(|| missing("digest of the tokens"))?.to_owned(),
            kl,
        })
    }

    /// The mean of several checkpoints' scores on the same windows, window by window; `None` for an empty list.
    pub fn averaged(all: Vec<Self>) -> Option<Self> {
        let mut all = all.into_iter();
        let mut mean = all.next()?;
        let mut count = 1.0;
        for other in all {
            count += 1.0;
            let step = |mean: &mut f64, other: f64| *mean += (other - *mean) / count;
            mean.kl.iter_mut().zip(&other.kl).for_each(|(m, o)| step(m, *o));
            mean.nll.iter_mut().zip(&other.nll).for_each(|(m, o)| step(m, *o));
            mean.draws.extend(other.draws);
        }
        if count > 1.0 {
            let of = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
            let windows = mean.kl.len() as f64;
            mean.kl_mean = of(&mean.kl);
            let squares: f64 = mean.kl.iter().map(|kl| (kl - mean.kl_mean).powi(2)).sum();
            mean.kl_error = (squares / (windows - 1.0) / windows).sqrt();
            mean.perplexity = of(&mean.nll).exp();
        }
        Some(mean)
    }

    fn windows(&self, metric: Metric) -> &[f64] {
        match metric {
            Metric::Kl => &self.kl,
            Metric::LogPerplexity => &self.nll,
        }
    }

    fn by_draw(&self, metric: Metric) -> impl Iterator<Item = f64> {
        let of = move |draw: &Draw| match metric {
            Metric::Kl => draw.kl.iter().sum(),
            Metric::LogPerplexity => draw.nll.iter().sum(),
        };
        self.draws.iter().map(of)
    }
}

#[derive(Clone, Copy)]
pub struct Pair<'a> {
    pub row: &'static Row,
    pub ours: &'a Scores,
    pub theirs: &'a Scores,
}

/// The difference of two checkpoints, pooled over rows.
#[derive(Debug, Clone, Copy)]
pub struct Pooled {
    metric: Metric,
    pub ours: f64,
    pub theirs: f64,
    pub difference: f64,
    /// The standard error of the difference.
    pub error: f64,
    pub tokens: f64,
}

/// Pools rows by tokens. Rows of one model and text are scored on the same windows, so a window's differences are added
/// over these rows before the spread over windows is computed. Models and texts are strata, each with its own mean.
///
/// The selection of calibration windows is random too, and all rows of a model share it. If there are several
/// selections, the spread of their differences is the second part of the error.
pub fn pooled<'a>(metric: Metric, pairs: impl IntoIterator<Item = Pair<'a>>) -> Pooled {
    let mut strata: BTreeMap<(&str, &str), Vec<(f64, f64)>> = BTreeMap::new();
    let mut draws: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let (mut ours, mut theirs, mut tokens) = (0.0, 0.0, 0.0);
    for pair in pairs {
        let n = pair.ours.tokens;
        let of_model = draws.entry(pair.row.name).or_default();
        of_model.resize(pair.ours.draws.len(), 0.0);
        let each = pair.ours.by_draw(metric).zip(pair.theirs.by_draw(metric));
        for (draw, (o, t)) in of_model.iter_mut().zip(each) {
            *draw += n * (o - t);
        }
        let (our, their) = (pair.ours.windows(metric), pair.theirs.windows(metric));
        let windows = strata.entry((pair.row.name, pair.row.evaluation)).or_default();
        windows.resize(our.len(), (0.0, 0.0));
        for ((o, t), window) in our.iter().zip(their).zip(windows) {
            ours += n * o;
            theirs += n * t;
            tokens += n;
            *window = (window.0 + n * (o - t), window.1 + n);
        }
    }
    let by_windows: f64 = strata
        .values()
        .map(|windows| {
            let count = windows.len() as f64;
            let mean = windows.iter().map(|w| w.0).sum::<f64>() / windows.iter().map(|w| w.1).sum::<f64>();
            let squares: f64 = windows.iter().map(|(total, n)| (total - mean * n).powi(2)).sum();
            squares * count / (count - 1.0)
        })
        .sum();
    let by_draws: f64 = draws
        .values()
        .filter(|draws| draws.len() > 1)
        .map(|draws| {
            let count = draws.len() as f64;
            let mean = draws.iter().sum::<f64>() / count;
            draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / (count - 1.0) / count
        })
        .sum();
    Pooled {
        metric,
        ours: ours / tokens,
        theirs: theirs / tokens,
        difference: (ours - theirs) / tokens,
        error: (by_windows + by_draws).sqrt() / tokens,
        tokens,
    }
}

impl Pooled {
    /// The amount by which quant may be worse.
    fn limit(&self, how: How) -> f64 {
        let tolerance = match self.metric {
            Metric::Kl => TOLERANCE * self.theirs,
            Metric::LogPerplexity => TOLERANCE,
        };
        match how {
            How::NoWorse => tolerance.max(ERRORS * self.error),
            How::Below => 0.0,
        }
    }

    /// Whether the claim holds.
    pub fn holds(&self, how: How) -> bool {
        match how {
            How::NoWorse => self.difference <= self.limit(how),
            How::Below => self.difference < 0.0,
        }
    }

    /// The verdict in one sentence.
    pub fn verdict(&self, how: How, (who, than): (&str, &str)) -> String {
        let Self { metric, ours, theirs, difference, error, tokens } = self;
        let (what, share) = match metric {
            Metric::Kl => ("mean KL", 100.0 * difference / theirs),
            Metric::LogPerplexity => ("log-perplexity", 100.0 * difference.exp_m1()),
        };
        let allowed = match how {
            How::NoWorse => format!("at most {:+.5} allowed", self.limit(how)),
            How::Below => "a smaller value is claimed".to_owned(),
        };
        format!(
            "{what}, pooled over {tokens:.0} tokens: {ours:.5} ({who}), {theirs:.5} ({than}), difference \
             {difference:+.5} ± {error:.5} ({share:+.1} %), {allowed}: the claim {}.",
            if self.holds(how) { "holds" } else { "does not hold" }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::rows::ROWS;

    fn scores(windows: &[f64]) -> Scores {
        Scores {
            kl: windows.to_vec(),
            nll: windows.to_vec(),
            kl_mean: 0.0,
            kl_error: 0.0,
            perplexity: 1.0,
            tokens: 10.0,
            sha256: String::new(),
            draws: vec![Draw { kl: windows.to_vec(), nll: windows.to_vec() }],
        }
    }

    /// The pooled result of some rows, each with the windows of quant and of the peer.
    fn of(metric: Metric, rows: &[(usize, &[f64], &[f64])]) -> Pooled {
        let scored: Vec<_> = rows.iter().map(|(row, o, t)| (&ROWS[*row], scores(o), scores(t))).collect();
        pooled(metric, scored.iter().map(|(row, ours, theirs)| Pair { row, ours, theirs }))
    }

    #[test]
    fn averages_are_taken_window_by_window() {
        let mean = Scores::averaged(vec![scores(&[1.0, 2.0, 3.0]), scores(&[3.0, 2.0, 4.0])]).unwrap();
        assert_eq!((&mean.kl[..], mean.kl_mean), (&[2.0, 2.0, 3.5][..], 2.5));
        // Deviations of -0.5, -0.5 and 1.
        assert!((mean.kl_error - (1.5 / 2.0 / 3.0_f64).sqrt()).abs() < 1e-12);
        assert!((mean.perplexity - 2.5_f64.exp()).abs() < 1e-12);
        assert!(Scores::averaged(Vec::new()).is_none());
        assert_eq!(Scores::averaged(vec![scores(&[1.0, 2.0])]).unwrap().perplexity, 1.0);
    }

    #[test]
    fn the_error_of_one_row_is_the_textbook_one() {
        let p = of(Metric::Kl, &[(0, &[1.1, 2.3, 3.2], &[1.0, 2.0, 3.0])]);
        // Differences 0.1, 0.3, 0.2: mean 0.2, standard deviation 0.1.
        assert!((p.difference - 0.2).abs() < 1e-12 && (p.theirs - 2.0).abs() < 1e-12, "{p:?}");
        assert!((p.error - 0.1 / 3f64.sqrt()).abs() < 1e-12, "{p:?}");
    }

    #[test]
    fn scoring_the_same_windows_again_adds_no_knowledge() {
        let (ours, theirs): (&[f64], &[f64]) = (&[1.1, 2.3, 3.2], &[1.0, 2.0, 3.0]);
        assert_eq!((ROWS[0].name, ROWS[0].evaluation), (ROWS[1].name, ROWS[1].evaluation));
        let once = of(Metric::Kl, &[(0, ours, theirs)]).error;
        assert!((of(Metric::Kl, &[(0, ours, theirs), (1, ours, theirs)]).error - once).abs() < 1e-12);
        let other = of(Metric::Kl, &[(0, ours, theirs), (3, ours, theirs)]).error;
        assert!((other - once / 2f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn selections_of_calibration_windows_are_draws_too() {
        let of_draws = |rows: &[usize], draws: &[f64]| {
            let all = draws.iter().map(|by| scores(&[1.0 + by, 2.0 + by])).collect();
            let ours = Scores::averaged(all).unwrap();
            let theirs = Scores::averaged(draws.iter().map(|_| scores(&[1.0, 2.0])).collect()).unwrap();
            let pair = |row: &usize| Pair { row: &ROWS[*row], ours: &ours, theirs: &theirs };
            pooled(Metric::Kl, rows.iter().map(pair))
        };
        // All windows differ by the same amount, so only the spread over three selections remains, whose deviation is
        // 0.1.
        let p = of_draws(&[0], &[0.1, 0.3, 0.2]);
        assert!((p.difference - 0.2).abs() < 1e-12, "{p:?}");
        assert!((p.error - 0.1 / 3f64.sqrt()).abs() < 1e-12, "{p:?}");
        // Selections are shared by different texts, and a single selection has no spread.
        assert_eq!(ROWS[0].name, ROWS[3].name);
        assert!((of_draws(&[0, 1, 3], &[0.1, 0.3, 0.2]).error - p.error).abs() < 1e-12);
        assert!(of_draws(&[0], &[0.1]).error < 1e-12);
    }

    #[test]
    fn the_claims_can_fail() {
        let theirs = [1.0, 2.0, 3.0];
        let shifted = |by: f64| of(Metric::Kl, &[(0, &theirs.map(|t| t + by), &theirs)]);
        let holds = |by| shifted(by).holds(How::NoWorse);
        assert!(holds(-1.0) && holds(0.0) && holds(0.009));
        assert!(!holds(0.011), "without spread, the limit is 0.5 % of 2.0");
        assert!(shifted(-0.1).holds(How::Below) && !shifted(0.0).holds(How::Below));
        let noisy = |by: f64| of(Metric::Kl, &[(0, &[1.0 + by, 2.2 + by, 2.8 + by], &theirs)]);
        assert!(noisy(0.2).holds(How::NoWorse) && !noisy(0.25).holds(How::NoWorse), "{:?}", noisy(0.2));
        // The limit for the perplexity is 0.5 %, whatever the perplexity is.
        let nats = |by: f64| of(Metric::LogPerplexity, &[(0, &theirs.map(|t| t + by), &theirs)]);
        assert!(nats(0.0049).holds(How::NoWorse) && !nats(0.0051).holds(How::NoWorse));
    }
}

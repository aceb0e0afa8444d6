//! Rotary position embedding: frequencies, their scaling for long contexts, and the tables.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::Segments;
use crate::checkpoint::ConfigFields;
use crate::{Error, Result};

/// The rotation of heads by their positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Width of a head; even.
    pub head_dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// How the rotary frequencies are changed for contexts longer than the model was trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor` (position interpolation).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: long wavelengths divided by `factor`, short ones kept, a smooth step between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original_positions / low` are divided.
        low: f64,
        /// Wavelengths below `original_positions / high` are kept.
        high: f64,
        /// Positions the model was first trained on.
        original_positions: f64,
    },
}

impl RopeScaling {
    /// Reads the base and the scaling from `rope_parameters` (transformers 5), or `rope_theta` and
    /// `rope_scaling` (before). `default_theta` is the base where neither has one.
    ///
    /// # Errors
    /// When a value is malformed, or the kind is none of `default`, `linear`, `llama3`.
    pub fn from_config(config: &ConfigFields<'_>, default_theta: f64) -> Result<(f64, Self)> {
        let parameters = config.optional_object("rope_parameters")?;
        let scaling = config.optional_object("rope_scaling")?;
        // Where both are there, transformers takes the older one.
        let nested = scaling.as_ref().or(parameters.as_ref());
        if let Some((fields, kind)) = nested
            .and_then(|fields| Some((fields, fields.map().iter().find(|(_, value)| value.is_object())?.0)))
        {
            return Err(fields.error(kind, "is a rotation of its own, and all blocks are rotated alike here"));
        }
        let own_theta = match nested {
            Some(fields) => fields.optional_f64("rope_theta")?,
            None => None,
        };
        let theta = match own_theta {
            Some(theta) => theta,
            None => config.optional_f64("rope_theta")?.unwrap_or(default_theta),
        };
        if theta <= 1.0 {
            return Err(config.error("rope_theta", format!("is {theta}; it must be above 1")));
        }
        let Some(fields) = nested else { return Ok((theta, Self::None)) };
        // Before transformers 4.43 the key was `type`.
        let kind = match fields.optional_str("rope_type")? {
            Some(kind) => kind,
            None => match fields.optional_str("type")? {
                Some(kind) => kind,
                None if fields.get("factor").is_some() => {
                    return Err(fields.error("rope_type", "is missing beside a factor"));
                }
                None => "default",
            },
        };
        let positive = |key: &str| {
            let value = fields.require_f64(key)?;
            if (value as f32).is_normal() && value > 0.0 {
                Ok(value)
            } else {
                Err(fields.error(key, format!("is {value}; it must be positive")))
            }
        };
        let scaling = match kind {
            "default" => Self::None,
            "linear" => Self::Linear { factor: positive("factor")? },
            "llama3" => {
                let (low, high) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
                if high <= low {
                    return Err(fields
                        .error("high_freq_factor", format!("is {high}, not above low_freq_factor {low}")));
                }
                Self::Llama3 {
                    factor: positive("factor")?,
                    low,
                    high,
                    original_positions: positive("original_max_position_embeddings")?,
                }
            }
            other => {
                return Err(fields.error(
                    "rope_type",
                    format!("is `{other}`; this version computes default, linear and llama3"),
                ));
            }
        };
        Ok((theta, scaling))
    }

    /// The angle by which each pair of a head turns per position, `[head_dim / 2]`.
    fn frequencies(self, theta: f64, head_dim: usize) -> Vec<f32> {
        // Rounded to f32 at each step, as the reference implementation computes them: at large
        // positions the rounding of the frequency is visible in the angle.
        let plain = (0..head_dim / 2).map(|i| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            1.0 / (theta as f32).powf(exponent)
        });
        match self {
            Self::None => plain.collect(),
            Self::Linear { factor } => plain.map(|f| f / factor as f32).collect(),
            Self::Llama3 { factor, low, high, original_positions } => plain
                .map(|f| {
                    let wavelength = std::f64::consts::TAU / f64::from(f);
                    if wavelength < original_positions / high {
                        f
                    } else if wavelength > original_positions / low {
                        f / factor as f32
                    } else {
                        let smooth = (original_positions / wavelength - low) / (high - low);
                        ((1.0 - smooth) * f64::from(f) / factor + smooth * f64::from(f)) as f32
                    }
                })
                .collect(),
        }
    }
}

/// Cosines and sines for the positions a run needs, each `[positions, head_dim / 2]`.
#[derive(Debug, Clone)]
pub struct RopeTable {
    cos: Tensor,
    sin: Tensor,
    head_dim: usize,
}

/// The tables of all rotations of a model.
#[derive(Debug, Clone)]
pub struct RopeTables(Vec<(Rope, Arc<RopeTable>)>);

impl RopeTables {
    /// Tables for positions `0..positions`, one for each distinct rotation.
    ///
    /// # Errors
    /// When the tensors cannot be made.
    pub fn new(ropes: impl Iterator<Item = Rope>, positions: usize) -> Result<Self> {
        let mut tables: Vec<(Rope, Arc<RopeTable>)> = Vec::new();
        for rope in ropes {
            if !tables.iter().any(|(known, _)| *known == rope) {
                tables.push((rope, Arc::new(RopeTable::new(rope, positions)?)));
            }
        }
        Ok(Self(tables))
    }

    /// The table of a rotation, if the model has it.
    pub fn get(&self, rope: &Rope) -> Option<&Arc<RopeTable>> {
        self.0.iter().find(|(known, _)| known == rope).map(|(_, table)| table)
    }
}

impl RopeTable {
    /// Tables for positions `0..positions`.
    ///
    /// # Errors
    /// When the tensors cannot be made.
    pub fn new(Rope { head_dim, theta, scaling }: Rope, positions: usize) -> Result<Self> {
        let frequencies = scaling.frequencies(theta, head_dim);
        let angles = || (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
        let table = |values: Vec<f32>| Tensor::from_vec(values, (positions, head_dim / 2), &Device::Cpu);
        Ok(Self {
            cos: table(angles().map(f32::cos).collect())?,
            sin: table(angles().map(f32::sin).collect())?,
            head_dim,
        })
    }

    /// Positions the tables cover.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Turns every head of `x` `[batch, positions, heads · head_dim]`, whose first row stands at
    /// position `start`.
    ///
    /// # Errors
    /// When the tables are too short.
    pub fn apply(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let positions = x.dims3()?.1;
        self.turn(x, &self.cos.narrow(0, start, positions)?, &self.sin.narrow(0, start, positions)?)
    }

    /// The same where positions are counted from the start of each segment.
    ///
    /// # Errors
    /// When the tables are too short, or the segments are those of another batch.
    pub fn apply_packed(&self, x: &Tensor, segments: Segments<'_>) -> Result<Tensor> {
        let (batch, positions, _) = x.dims3()?;
        let fits = segments.fit(batch, positions);
        let Some(places) = fits.then(|| segments.positions(positions)).flatten() else {
            return Err(Error::Internal(format!("segments do not fit {:?}", x.dims())));
        };
        let places = Tensor::from_vec(places, batch * positions, &Device::Cpu)?;
        let rows = |table: &Tensor| -> Result<Tensor> {
            Ok(table.index_select(&places, 0)?.reshape((batch, positions, self.head_dim / 2))?)
        };
        self.turn(x, &rows(&self.cos)?, &rows(&self.sin)?)
    }

    fn turn(&self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        let (batch, positions, width) = x.dims3()?;
        let heads = x.reshape((batch, positions, width / self.head_dim, self.head_dim))?;
        let turned = candle_nn::rotary_emb::rope_thd(&heads.contiguous()?, cos, sin)?;
        Ok(turned.reshape((batch, positions, width))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_divides_long_and_joins_smoothly() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 8192.0 };
        let plain = RopeScaling::None.frequencies(500_000.0, 128);
        let scaled = scaling.frequencies(500_000.0, 128);
        let ratio: Vec<f32> = plain.iter().zip(&scaled).map(|(p, s)| p / s).collect();
        assert_eq!(ratio[0], 1.0);
        assert!((ratio[63] - 8.0).abs() < 1e-5);
        assert!(ratio.windows(2).all(|w| w[0] <= w[1] + 1e-5), "{ratio:?}");
        assert!(ratio.iter().any(|r| *r > 1.1 && *r < 7.9));
    }

    fn read(config: serde_json::Value) -> Result<(f64, RopeScaling)> {
        let path = std::path::Path::new("config.json");
        RopeScaling::from_config(&ConfigFields::new(path, config.as_object().unwrap()), 10_000.0)
    }

    #[test]
    fn the_older_key_wins_as_in_transformers() {
        use serde_json::json;
        let linear = json!({"rope_type": "linear", "factor": 4.0});
        let plain = json!({"rope_type": "default", "rope_theta": 20000.0});
        let (theta, scaling) =
            read(json!({"rope_theta": 7e5, "rope_parameters": plain, "rope_scaling": linear})).unwrap();
        assert_eq!((theta, scaling), (7e5, RopeScaling::Linear { factor: 4.0 }));
        assert_eq!(read(json!({"rope_parameters": plain})).unwrap(), (20000.0, RopeScaling::None));
        let own = json!({"type": "linear", "factor": 2.0, "rope_theta": 5e5});
        assert_eq!(read(json!({"rope_scaling": own})).unwrap(), (5e5, RopeScaling::Linear { factor: 2.0 }));
        assert_eq!(read(json!({"rope_scaling": null})).unwrap(), (10_000.0, RopeScaling::None));
        for bad in [
            json!({"factor": 8.0}),
            json!({"rope_type": "yarn"}),
            json!({"rope_type": "linear", "factor": 1e-300}),
            // A rotation for each kind of block.
            json!({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}),
        ] {
            assert!(read(json!({"rope_scaling": bad})).is_err(), "{bad}");
        }
    }
}

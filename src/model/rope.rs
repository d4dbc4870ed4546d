//! Rotary frequencies of a model, with the scalings that extend a context.
//!
//! The formulas are those of the public reference (Transformers, `modeling_rope_utils`), computed in f64 and rounded
//! once. The device multiplies the frequencies by the positions. Scalings whose frequencies depend on the length of the
//! sequence are not supported.

#![forbid(unsafe_code)]

use std::f64::consts::TAU;

use super::ModelError;
use super::error::invalid;

/// Scaling of the rotary frequencies, which are `theta^(-2i / width)` without scaling.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    Default,
    /// All frequencies are divided by `factor`.
    Linear {
        /// Factor by which the context is extended.
        factor: f64,
    },
    /// Llama 3: low frequencies are divided by `factor`, high ones are kept, and a ramp interpolates between them.
    Llama3 {
        /// Factor by which the context is extended.
        factor: f64,
        /// Frequencies with wavelengths above `original / low_freq_factor` are divided by `factor`.
        low_freq_factor: f64,
        /// Frequencies with wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the original training.
        original_max_position_embeddings: u32,
    },
    /// `YaRN`: a ramp over the dimensions by their number of rotations in the original context, and a factor on cosines
    /// and sines.
    Yarn {
        /// Factor by which the context is extended.
        factor: f64,
        /// Context length of the original training.
        original_max_position_embeddings: u32,
        /// Dimensions with more rotations than this are kept; usually 32.
        beta_fast: f64,
        /// Dimensions with fewer rotations than this are divided by `factor`; usually 1.
        beta_slow: f64,
        /// Factor on cosines and sines; if it is `None`, it is derived from `factor` and the two fields below.
        attention_factor: Option<f64>,
        /// Coefficient in the numerator of the derived factor (used only with `mscale_all_dim`).
        mscale: Option<f64>,
        /// Coefficient in the denominator of the derived factor (used only with `mscale`).
        mscale_all_dim: Option<f64>,
        /// Whether the ends of the ramp are rounded to whole dimensions; usually true.
        truncate: bool,
    },
}

impl RopeScaling {
    /// Checks the parameters of the scaling.
    ///
    /// # Errors
    /// [`ModelError::InvalidField`] for a parameter that is not a finite number in its valid range.
    pub fn validate(&self) -> Result<(), ModelError> {
        let factor_of = |factor: f64| {
            let sound = factor >= 1.0 && factor.is_finite();
            if sound { Ok(()) } else { Err(invalid("rope_scaling.factor", factor, "a finite number of at least 1")) }
        };
        let positive = |field: &str, value: f64| {
            let sound = value > 0.0 && value.is_finite();
            if sound { Ok(()) } else { Err(invalid(field, value, "a finite number above 0")) }
        };
        let original = |tokens: u32| positive("rope_scaling.original_max_position_embeddings", f64::from(tokens));
        match *self {
            Self::Default => Ok(()),
            Self::Linear { factor } => factor_of(factor),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                factor_of(factor)?;
                original(original_max_position_embeddings)?;
                positive("rope_scaling.low_freq_factor", low_freq_factor)?;
                positive("rope_scaling.high_freq_factor", high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    let expected = format!("more than low_freq_factor {low_freq_factor}");
                    return Err(invalid("rope_scaling.high_freq_factor", high_freq_factor, &expected));
                }
                Ok(())
            }
            Self::Yarn { factor, original_max_position_embeddings, beta_fast, beta_slow, attention_factor, .. } => {
                factor_of(factor)?;
                original(original_max_position_embeddings)?;
                positive("rope_scaling.beta_fast", beta_fast)?;
                positive("rope_scaling.beta_slow", beta_slow)?;
                if beta_fast < beta_slow {
                    let expected = format!("at least beta_slow {beta_slow}");
                    return Err(invalid("rope_scaling.beta_fast", beta_fast, &expected));
                }
                attention_factor.map_or(Ok(()), |given| positive("rope_scaling.attention_factor", given))
            }
        }
    }

    /// Returns the frequency of each pair of a head with `head_dim` rotary elements, and the factor on cosines and
    /// sines.
    #[allow(clippy::cast_possible_truncation)]
    pub fn inv_freq(&self, head_dim: usize, theta: f64) -> (Vec<f32>, f32) {
        let width = head_dim as f64;
        let plain = (0..head_dim / 2).map(|i| theta.powf(-((2 * i) as f64) / width));
        let (frequencies, factor): (Vec<f64>, f64) = match *self {
            Self::Default => (plain.collect(), 1.0),
            Self::Linear { factor } => (plain.map(|f| f / factor).collect(), 1.0),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let original = f64::from(original_max_position_embeddings);
                let scaled = plain.map(|f| {
                    let wavelength = TAU / f;
                    if wavelength < original / high_freq_factor {
                        f
                    } else if wavelength > original / low_freq_factor {
                        f / factor
                    } else {
                        let kept = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        (1.0 - kept) * f / factor + kept * f
                    }
                });
                (scaled.collect(), 1.0)
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
                mscale,
                mscale_all_dim,
                truncate,
            } => {
                let original = f64::from(original_max_position_embeddings);
                // Dimension with `turns` rotations in the original context.
                let dimension = |turns: f64| width * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
                let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min(width - 1.0);
                if low == high {
                    high += 0.001;
                }
                let scaled = plain.enumerate().map(|(i, f)| {
                    let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * stretched + f * (1.0 - stretched)
                });
                let given = attention_factor.unwrap_or_else(|| match (mscale, mscale_all_dim) {
                    (Some(above), Some(below)) if above != 0.0 && below != 0.0 => {
                        yarn_mscale(factor, above) / yarn_mscale(factor, below)
                    }
                    _ => yarn_mscale(factor, 1.0),
                });
                (scaled.collect(), given)
            }
        };
        (frequencies.into_iter().map(|f| f as f32).collect(), factor as f32)
    }
}

fn yarn_mscale(factor: f64, coefficient: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * coefficient * factor.ln() + 1.0 }
}

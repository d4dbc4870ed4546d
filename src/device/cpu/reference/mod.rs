//! Reference implementations: the definition of each operation, in plain f32 in index order, over contiguous rows.
//!
//! They serve as definitions and test oracles, not as fast paths: no tiles, no SIMD, no fused multiply-adds, and
//! `f32`'s own `exp` and `tanh`. Fast paths agree with them within rounding; where additions happen in the same order,
//! the tests state it. Slices are whole row-major matrices; the caller has checked their sizes.

#![forbid(unsafe_code)]

pub mod model;

use crate::graph::{RopeStyle, RowStatus};
use crate::weights::DType;

/// `out[r] = table[ids[r]]`, rows of `width` elements. `dequantize` writes one row of the table.
pub fn embed(ids: &[u32], width: usize, dequantize: &mut dyn FnMut(usize, &mut [f32]), out: &mut [f32]) {
    for (id, row) in ids.iter().zip(out.chunks_exact_mut(width)) {
        dequantize(*id as usize, row);
    }
}

/// `out = x / √(mean(x²) + eps) · weight`, per row.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    for (x, y) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let mut sum = 0.0f32;
        for v in x {
            sum += v * v;
        }
        let scale = 1.0 / (sum / width as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * scale * w;
        }
    }
}

/// `out = (x − mean) / √(variance + eps) · weight + bias`, per row.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let width = weight.len();
    for (x, y) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let mean = x.iter().sum::<f32>() / width as f32;
        let variance = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / width as f32;
        let scale = 1.0 / (variance + eps).sqrt();
        for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
            *y = (x - mean) * scale * weight[i] + bias.map_or(0.0, |b| b[i]);
        }
    }
}

/// `out = a + b`.
pub fn add(a: &[f32], b: &[f32], out: &mut [f32]) {
    for ((y, a), b) in out.iter_mut().zip(a).zip(b) {
        *y = a + b;
    }
}

/// `out = a · b`.
pub fn mul(a: &[f32], b: &[f32], out: &mut [f32]) {
    for ((y, a), b) in out.iter_mut().zip(a).zip(b) {
        *y = a * b;
    }
}

/// Activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `x / (1 + exp(−x))`.
    Silu,
    /// `x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))`.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

/// `out = f(x)`.
pub fn activation(kind: Activation, x: &[f32], out: &mut [f32]) {
    for (y, &x) in out.iter_mut().zip(x) {
        *y = match kind {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh()),
            // Not `f32::max`, which would turn NaN into 0.
            Activation::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
        };
    }
}

/// `out = x · factor`.
pub fn scale(x: &[f32], factor: f32, out: &mut [f32]) {
    for (y, x) in out.iter_mut().zip(x) {
        *y = x * factor;
    }
}

/// `out[r][n] = Σ_k x[r][k] · weight[n][k] + bias[n]`, with weights already converted to f32.
pub fn linear(x: &[f32], weight: &[f32], bias: Option<&[f32]>, inputs: usize, outputs: usize, out: &mut [f32]) {
    for (x, y) in x.chunks_exact(inputs).zip(out.chunks_exact_mut(outputs)) {
        for (n, (y, w)) in y.iter_mut().zip(weight.chunks_exact(inputs)).enumerate() {
            let mut sum = 0.0f32;
            for (x, w) in x.iter().zip(w) {
                sum += x * w;
            }
            *y = sum + bias.map_or(0.0, |b| b[n]);
        }
    }
}

/// Rotates every head of every row; `cos` and `sin` hold `pairs` values per row.
pub fn rope(x: &mut [f32], heads: usize, head_dim: usize, style: RopeStyle, pairs: usize, cos: &[f32], sin: &[f32]) {
    for (r, row) in x.chunks_exact_mut(heads * head_dim).enumerate() {
        for head in row.chunks_exact_mut(head_dim) {
            for i in 0..pairs {
                let (first, second) = match style {
                    RopeStyle::Half => (i, i + pairs),
                    RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                };
                let (a, b, c, s) = (head[first], head[second], cos[r * pairs + i], sin[r * pairs + i]);
                head[first] = a * c - b * s;
                head[second] = b * c + a * s;
            }
        }
    }
}

/// Computes cosines, then sines, of each position: the angle is rounded to f32, its cosine and sine are computed in f64
/// and rounded.
#[allow(clippy::cast_possible_truncation)]
pub fn rope_angles(inv_freq: &[f32], attention_factor: f32, positions: &[u32], out: &mut [f32]) {
    let pairs = inv_freq.len();
    for (position, row) in positions.iter().zip(out.chunks_exact_mut(2 * pairs)) {
        let (cos, sin) = row.split_at_mut(pairs);
        for ((f, c), s) in inv_freq.iter().zip(cos).zip(sin) {
            let angle = f64::from(*position as f32 * f);
            *c = angle.cos() as f32 * attention_factor;
            *s = angle.sin() as f32 * attention_factor;
        }
    }
}

/// `out = x` with the rounding of int8 activations: each block of 32 of a row is rounded to 127 steps in each
/// direction, ties to even. A block that is not finite becomes NaN.
pub fn quantize(x: &[f32], width: usize, out: &mut [f32]) {
    for (x, y) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        for (x, y) in x.chunks(32).zip(y.chunks_mut(32)) {
            quantize_together(x, y);
        }
    }
}

/// `out = x` with the rounding of int8 keys and values: each head of `head_dim` is rounded to 127 steps in each
/// direction, ties to even. A head that is not finite becomes NaN.
pub fn quantize_heads(x: &[f32], head_dim: usize, out: &mut [f32]) {
    for (x, y) in x.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
        quantize_together(x, y);
    }
}

/// Rounds elements that share one scale.
fn quantize_together(x: &[f32], out: &mut [f32]) {
    let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let is_finite = x.iter().all(|x| x.is_finite());
    let inverse = 127.0 / largest;
    for (y, x) in out.iter_mut().zip(x) {
        *y = if !is_finite {
            f32::NAN
        } else if inverse.is_finite() {
            (x * inverse).round_ties_even() * (largest / 127.0)
        } else {
            0.0
        };
    }
}

/// Parameters of [`attention`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct AttentionParams {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// Sliding window: largest number of tokens a row sees, itself included.
    pub window: Option<u32>,
    pub softcap: Option<f32>,
}

/// Causal attention of one sequence over contiguous keys and values (`[token][kv head][head_dim]`). Row `r` of the
/// queries is at position `tokens − rows + r`. A plain softmax: maximum, exponentials, one division.
pub fn attention(p: &AttentionParams, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
    let (q_width, kv_width) = (p.heads * p.head_dim, p.kv_heads * p.head_dim);
    let (rows, tokens) = (q.len() / q_width, k.len() / kv_width);
    let mut weights = Vec::with_capacity(tokens);
    for row in 0..rows {
        let end = tokens - rows + row + 1;
        let start = p.window.map_or(0, |w| end.saturating_sub(w as usize));
        for head in 0..p.heads {
            let kv = head / (p.heads / p.kv_heads) * p.head_dim;
            let at = row * q_width + head * p.head_dim;
            let query = &q[at..at + p.head_dim];
            weights.clear();
            for token in start..end {
                let mut sum = 0.0f32;
                for (x, y) in query.iter().zip(&k[token * kv_width + kv..]) {
                    sum += x * y;
                }
                let score = sum * p.scale;
                weights.push(p.softcap.map_or(score, |cap| cap * (score / cap).tanh()));
            }
            let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut total = 0.0f32;
            for w in &mut weights {
                *w = (*w - largest).exp();
                total += *w;
            }
            let out = &mut out[at..at + p.head_dim];
            out.fill(0.0);
            for (token, w) in (start..end).zip(&weights) {
                for (y, v) in out.iter_mut().zip(&v[token * kv_width + kv..]) {
                    *y += w * v;
                }
            }
            for y in out {
                *y /= total;
            }
        }
    }
}

/// `out[i] = x[rows[i]]`, rows of `width` elements.
pub fn gather_rows(x: &[f32], rows: &[u32], width: usize, out: &mut [f32]) {
    for (row, y) in rows.iter().zip(out.chunks_exact_mut(width)) {
        y.copy_from_slice(&x[*row as usize * width..][..width]);
    }
}

/// Index of the largest element. The lowest index wins a tie, and NaN never wins over a number.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, x) in row.iter().enumerate() {
        if *x > row[best] || (row[best].is_nan() && !x.is_nan()) {
            best = i;
        }
    }
    best
}

/// Whether every element of a row is finite.
pub fn row_status(row: &[f32]) -> RowStatus {
    if row.iter().all(|x| x.is_finite()) { RowStatus::Ok } else { RowStatus::NonFinite }
}

/// Rounds to the precision of a float storage type and back; integer formats have converters of their own.
pub fn round_to(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F16 => half::f16::from_f32(if x.is_nan() { x } else { x.clamp(-65504.0, 65504.0) }).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

//! Element-wise operations: sums, products, activations, conversions, copies.

use super::{has_dims, is_contiguous, is_one_of, same_elem};
use crate::codes::{Done, OP_INVALID, rule};
use crate::executor::{Prepared, input, output};
use crate::operands::Bench;
use crate::tensor::{Elem, View};

/// `out = f(x)`, with one float type for both.
pub(crate) fn map(x: &View, out: &View, f: impl Fn(f32) -> f32 + Send + Sync + 'static) -> Done<Prepared> {
    rule!(x.elem.is_float(), OP_INVALID, "self is {:?}", x.elem);
    same_elem(x, out, "out")?;
    has_dims(out, &x.dims, "out")?;
    let kernel = move |bench: &mut Bench<'_>| {
        let values: Vec<f32> = bench.floats(0)?.into_iter().map(&f).collect();
        bench.store(1, &values)
    };
    Ok(Prepared::new(vec![input(0, x), output(0, out)], kernel).vector(4 * x.count()))
}

pub(crate) fn silu(v: f32) -> f32 {
    v / (1.0 + (-v).exp())
}

/// The tanh approximation of GELU.
pub(crate) fn gelu_tanh(v: f32) -> f32 {
    let inner = (2.0 / std::f32::consts::PI).sqrt() * (v + 0.044_715 * v * v * v);
    0.5 * v * (1.0 + inner.tanh())
}

/// `out = f(a, b)` with broadcasting, or `g(a, b)` for integers.
pub(crate) fn zip(
    a: &View,
    b: &View,
    out: &View,
    f: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
    g: impl Fn(i64, i64) -> i64 + Send + Sync + 'static,
) -> Done<Prepared> {
    rule!(a.elem.is_float() || a.elem.is_index(), OP_INVALID, "self is {:?}", a.elem);
    same_elem(a, b, "other")?;
    same_elem(a, out, "out")?;
    let (spread_a, spread_b) = (spread(a, &out.dims)?, spread(b, &out.dims)?);
    let is_needed = |(at, &dim): (usize, &usize)| {
        let from = |view: &View| (view.dims.len() + at).checked_sub(out.dims.len()).map_or(1, |at| view.dims[at]);
        dim == from(a).max(from(b))
    };
    let is_joint = out.dims.iter().enumerate().all(is_needed);
    rule!(is_joint, OP_INVALID, "out {:?} of {:?} and {:?}", out.dims, a.dims, b.dims);
    let is_whole = a.elem.is_index();
    let kernel = move |bench: &mut Bench<'_>| {
        if is_whole {
            let (a, b) = (bench.whole(0)?, bench.whole(1)?);
            let values: Vec<i64> = a.iter().zip(&b).map(|(&a, &b)| g(a, b)).collect();
            return bench.store_whole(2, &values);
        }
        let (a, b) = (bench.floats(0)?, bench.floats(1)?);
        let values: Vec<f32> = a.iter().zip(&b).map(|(&a, &b)| f(a, b)).collect();
        bench.store(2, &values)
    };
    let operands = vec![input(0, &spread_a), input(1, &spread_b), output(0, out)];
    let bytes = a.bytes() + b.bytes() + out.bytes();
    Ok(Prepared::new(operands, kernel).vector(out.count()).bytes(bytes))
}

/// Broadcasts a view to a larger shape, with strides of 0.
fn spread(view: &View, dims: &[usize]) -> Done<View> {
    let missing = dims.len().checked_sub(view.dims.len());
    let mut strides = vec![0; missing.unwrap_or(0)];
    for ((&from, &stride), &to) in view.dims.iter().zip(&view.strides).zip(&dims[strides.len()..]) {
        rule!(from == to || from == 1, OP_INVALID, "{:?} does not broadcast to {dims:?}", view.dims);
        strides.push(if from == to { stride } else { 0 });
    }
    rule!(missing.is_some(), OP_INVALID, "{:?} does not broadcast to {dims:?}", view.dims);
    Ok(View { dims: dims.to_vec(), strides, ..view.clone() })
}

/// `out[.., n] = silu(x[.., ..n]) · x[.., n..]`.
pub(crate) fn swiglu(x: &View, dim: i64, out: &View) -> Done<Prepared> {
    rule!(x.elem.is_float(), OP_INVALID, "x is {:?}", x.elem);
    same_elem(x, out, "out")?;
    is_contiguous(x, "x")?;
    rule!(dim == -1 || dim == x.dims.len() as i64 - 1, OP_INVALID, "dim {dim}; the last one is supported here");
    let n = x.cols() / 2;
    rule!(
        x.cols().is_multiple_of(2) && out.cols() == n && out.rows() == x.rows(),
        OP_INVALID,
        "out {:?} of {:?}",
        out.dims,
        x.dims
    );
    let kernel = move |bench: &mut Bench<'_>| {
        let x = bench.floats(0)?;
        let rows = x.chunks(2 * n);
        let values: Vec<f32> =
            rows.flat_map(|row| row[..n].iter().zip(&row[n..]).map(|(&gate, &up)| silu(gate) * up)).collect();
        bench.store(1, &values)
    };
    Ok(Prepared::new(vec![input(0, x), output(0, out)], kernel).vector(5 * out.count()))
}

pub(crate) fn cast(x: &View, elem: i32, out: &View) -> Done<Prepared> {
    rule!(Elem::from_code(elem) == Some(out.elem), OP_INVALID, "dtype {elem} and out of {:?}", out.elem);
    rule!(x.elem != Elem::I4 && out.elem != Elem::I4, OP_INVALID, "int4 cannot be cast");
    copy_of(x, out, vec![input(0, x), output(0, out)], 0, 1)
}

/// `dst = src`, with broadcasting and conversion.
pub(crate) fn copy(dst: &View, src: &View) -> Done<Prepared> {
    let spread = spread(src, &dst.dims)?;
    copy_of(&spread, dst, vec![input(0, dst), input(1, &spread)], 1, 0)
}

fn copy_of(
    from: &View,
    to: &View,
    operands: Vec<crate::executor::Operand>,
    source: usize,
    target: usize,
) -> Done<Prepared> {
    has_dims(to, &from.dims, "out")?;
    // Integers must not be rounded to f32 in between; a cast to an integer truncates the fraction.
    let is_whole = !from.elem.is_float() && !to.elem.is_float();
    let kernel = move |bench: &mut Bench<'_>| {
        if is_whole {
            let values = bench.whole(source)?;
            bench.store_whole(target, &values)
        } else {
            let values = bench.floats(source)?;
            bench.store(target, &values)
        }
    };
    Ok(Prepared::new(operands, kernel).vector(to.count()))
}

pub(crate) fn is_finite(x: &View, out: &View) -> Done<Prepared> {
    rule!(x.elem.is_float(), OP_INVALID, "self is {:?}", x.elem);
    is_one_of(out, &[Elem::Bool], "out")?;
    has_dims(out, &x.dims, "out")?;
    let kernel = |bench: &mut Bench<'_>| {
        let flags: Vec<i64> = bench.floats(0)?.iter().map(|v| i64::from(v.is_finite())).collect();
        bench.store_whole(1, &flags)
    };
    Ok(Prepared::new(vec![input(0, x), output(0, out)], kernel).vector(x.count()))
}

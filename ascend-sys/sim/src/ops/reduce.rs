//! Reductions along rows: argmax, top-k, softmax, all.

use super::{has_dims, is_one_of, same_elem};
use crate::codes::{Done, OP_INVALID, rule};
use crate::executor::{Prepared, input, output};
use crate::operands::Bench;
use crate::tensor::{Elem, View};
use std::cmp::Ordering;

/// Largest accepted k.
const MAX_K: i64 = 1024;

fn check_last(x: &View, dim: i64) -> Done {
    rule!(dim == -1 || dim + 1 == x.dims.len() as i64, OP_INVALID, "dim {dim}; the last one is supported here");
    Ok(())
}

/// Descending order in which NaN is largest.
fn descending(a: f32, b: f32) -> Ordering {
    b.is_nan().cmp(&a.is_nan()).then(b.partial_cmp(&a).unwrap_or(Ordering::Equal))
}

/// Index of the largest element of each row; the first one wins a tie.
pub(crate) fn arg_max(x: &View, dim: i64, keeps_dim: bool, out: &View) -> Done<Prepared> {
    rule!(x.elem.is_float(), OP_INVALID, "self is {:?}", x.elem);
    rule!(out.elem.is_index(), OP_INVALID, "out is {:?}", out.elem);
    check_last(x, dim)?;
    has_dims(out, &reduced(x, keeps_dim), "out")?;
    let cols = x.cols();
    let kernel = move |bench: &mut Bench<'_>| {
        let x = bench.floats(0)?;
        let best = |row: &[f32]| {
            let largest = (0..row.len()).min_by(|&a, &b| descending(row[a], row[b]).then(a.cmp(&b)));
            largest.unwrap_or(0) as i64
        };
        let places: Vec<i64> = x.chunks(cols).map(best).collect();
        bench.store_whole(1, &places)
    };
    Ok(Prepared::new(vec![input(0, x), output(0, out)], kernel).vector(x.count()))
}

fn reduced(x: &View, keeps_dim: bool) -> Vec<usize> {
    let mut dims = x.dims.clone();
    dims.pop();
    if keeps_dim {
        dims.push(1);
    }
    dims
}

/// The k largest elements of each row, in descending order.
pub(crate) fn top_k(
    x: &View,
    k: i64,
    dim: i64,
    largest: bool,
    sorted: bool,
    values: &View,
    places: &View,
) -> Done<Prepared> {
    rule!(x.elem.is_float(), OP_INVALID, "self is {:?}", x.elem);
    rule!(largest && sorted, OP_INVALID, "largest and sorted must be true");
    check_last(x, dim)?;
    rule!((1..=MAX_K).contains(&k) && k <= x.cols() as i64, OP_INVALID, "k {k} of {}; at most {MAX_K}", x.cols());
    same_elem(x, values, "valuesOut")?;
    is_one_of(places, &[Elem::I64], "indicesOut")?;
    let k = usize::try_from(k).unwrap_or(1);
    let mut dims = reduced(x, false);
    dims.push(k);
    has_dims(values, &dims, "valuesOut")?;
    has_dims(places, &dims, "indicesOut")?;
    let cols = x.cols();
    let kernel = move |bench: &mut Bench<'_>| {
        let x = bench.floats(0)?;
        let (mut values, mut places) = (Vec::new(), Vec::new());
        for row in x.chunks(cols) {
            let mut order: Vec<usize> = (0..cols).collect();
            order.sort_by(|&a, &b| descending(row[a], row[b]));
            values.extend(order[..k].iter().map(|&i| row[i]));
            places.extend(order[..k].iter().map(|&i| i as i64));
        }
        bench.store(1, &values)?;
        bench.store_whole(2, &places)
    };
    let operands = vec![input(0, x), output(0, values), output(1, places)];
    Ok(Prepared::new(operands, kernel).vector(8 * x.count()).workspace(2 * x.bytes()))
}

pub(crate) fn softmax(x: &View, dim: i64, out: &View) -> Done<Prepared> {
    rule!(x.elem.is_float(), OP_INVALID, "self is {:?}", x.elem);
    same_elem(x, out, "out")?;
    has_dims(out, &x.dims, "out")?;
    check_last(x, dim)?;
    let cols = x.cols();
    let kernel = move |bench: &mut Bench<'_>| {
        let mut x = bench.floats(0)?;
        x.chunks_mut(cols).for_each(soften);
        bench.store(1, &x)
    };
    Ok(Prepared::new(vec![input(0, x), output(0, out)], kernel).vector(5 * x.count()))
}

/// Softmax of a row, in place.
pub(super) fn soften(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for v in &mut *row {
        *v = (*v - largest).exp();
    }
    let sum: f32 = row.iter().sum();
    for v in row {
        *v /= sum;
    }
}

/// Whether all elements along some dimensions are true.
pub(crate) fn all(x: &View, dims: &[i64], keeps_dim: bool, out: &View) -> Done<Prepared> {
    is_one_of(x, &[Elem::Bool, Elem::U8], "self")?;
    is_one_of(out, &[Elem::Bool, Elem::U8], "out")?;
    let rank = x.dims.len() as i64;
    let is_last = matches!(dims, [dim] if *dim == -1 || *dim == rank - 1);
    let is_every = !dims.is_empty() && dims.len() as i64 == rank;
    rule!(is_last || is_every, OP_INVALID, "dims {dims:?} of {rank}; the last or all are supported here");
    let (cols, wanted) = if is_every {
        (x.count(), if keeps_dim { vec![1; x.dims.len()] } else { Vec::new() })
    } else {
        (x.cols(), reduced(x, keeps_dim))
    };
    let is_single = is_every && out.count() == 1;
    rule!(is_single || out.dims == wanted, OP_INVALID, "out {:?}, not {wanted:?}", out.dims);
    let kernel = move |bench: &mut Bench<'_>| {
        let x = bench.whole(0)?;
        let flags: Vec<i64> = x.chunks(cols).map(|row| i64::from(row.iter().all(|&v| v != 0))).collect();
        bench.store_whole(1, &flags)
    };
    Ok(Prepared::new(vec![input(0, x), output(0, out)], kernel).vector(x.count()))
}

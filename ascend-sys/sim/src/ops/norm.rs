//! RMS normalization, with and without a preceding addition.

use super::{has_dims, is_one_of, same_elem};
use crate::codes::{Done, OP_INVALID, rule};
use crate::executor::{Prepared, input, output};
use crate::operands::{Bench, rounded};
use crate::tensor::{Elem, View};

/// Number of vector operations per normalized element.
const COST: usize = 4;

fn check(x: &View, gamma: &View, y: &View, rstd: &View) -> Done {
    let group = gamma.dims.len();
    rule!(
        group >= 1 && x.dims.len() >= group && x.dims[x.dims.len() - group..] == gamma.dims,
        OP_INVALID,
        "gamma {:?} for rows of {:?}",
        gamma.dims,
        x.dims
    );
    same_elem(x, y, "y")?;
    has_dims(y, &x.dims, "y")?;
    is_one_of(rstd, &[Elem::F32], "rstd")?;
    Ok(())
}

/// Checks `rstd`, which has one value per row: x's leading dimensions, then ones.
fn check_rstd(x: &View, gamma: &View, rstd: &View, may_drop: bool) -> Done {
    let leading = &x.dims[..x.dims.len() - gamma.dims.len()];
    let with_ones = [leading, &vec![1; gamma.dims.len()]].concat();
    let fits = rstd.dims == with_ones || (may_drop && rstd.dims == leading);
    rule!(fits, OP_INVALID, "rstd {:?} for {:?}; it has one value a row: {with_ones:?}", rstd.dims, x.dims);
    Ok(())
}

pub(crate) fn rms_norm(x: &View, gamma: &View, epsilon: f64, y: &View, rstd: &View) -> Done<Prepared> {
    let fits = match x.elem {
        Elem::F32 => gamma.elem == Elem::F32,
        elem => elem.is_half() && (gamma.elem == elem || gamma.elem == Elem::F32),
    };
    rule!(fits, OP_INVALID, "x is {:?} and gamma {:?}", x.elem, gamma.elem);
    check(x, gamma, y, rstd)?;
    check_rstd(x, gamma, rstd, true)?;
    let kernel = move |bench: &mut Bench<'_>| {
        let (x, gamma) = (bench.floats(0)?, bench.floats(1)?);
        let (y, rstd) = normalized(&x, &gamma, epsilon);
        bench.store(2, &y)?;
        bench.store(3, &rstd)
    };
    let operands = vec![input(0, x), input(1, gamma), output(0, y), output(1, rstd)];
    Ok(Prepared::new(operands, kernel).vector(COST * x.count()))
}

pub(crate) fn add_rms_norm(
    x1: &View,
    x2: &View,
    gamma: &View,
    epsilon: f64,
    y: &View,
    rstd: &View,
    sum: &View,
) -> Done<Prepared> {
    rule!(x1.elem.is_float(), OP_INVALID, "x1 is {:?}", x1.elem);
    for (view, what) in [(x2, "x2"), (gamma, "gamma"), (sum, "xOut")] {
        same_elem(x1, view, what)?;
    }
    has_dims(x2, &x1.dims, "x2")?;
    has_dims(sum, &x1.dims, "xOut")?;
    check(x1, gamma, y, rstd)?;
    check_rstd(x1, gamma, rstd, false)?;
    let elem = x1.elem;
    let kernel = move |bench: &mut Bench<'_>| {
        let (x1, x2, gamma) = (bench.floats(0)?, bench.floats(1)?, bench.floats(2)?);
        let sum: Vec<f32> = x1.iter().zip(&x2).map(|(a, b)| rounded(a + b, elem)).collect();
        let (y, rstd) = normalized(&sum, &gamma, epsilon);
        bench.store(3, &y)?;
        bench.store(4, &rstd)?;
        bench.store(5, &sum)
    };
    let operands = vec![input(0, x1), input(1, x2), input(2, gamma), output(0, y), output(1, rstd), output(2, sum)];
    Ok(Prepared::new(operands, kernel).vector((COST + 1) * x1.count()))
}

/// Normalized rows of the length of `gamma`, and the factor of each.
fn normalized(x: &[f32], gamma: &[f32], epsilon: f64) -> (Vec<f32>, Vec<f32>) {
    #[allow(clippy::cast_possible_truncation)]
    let epsilon = epsilon as f32;
    let factor = |row: &[f32]| {
        let mean = row.iter().map(|v| v * v).sum::<f32>() / row.len() as f32;
        1.0 / (mean + epsilon).sqrt()
    };
    let rstd: Vec<f32> = x.chunks(gamma.len()).map(factor).collect();
    let rows = x.chunks(gamma.len()).zip(&rstd);
    let y = rows.flat_map(|(row, rstd)| row.iter().zip(gamma).map(move |(v, g)| v * rstd * g)).collect();
    (y, rstd)
}

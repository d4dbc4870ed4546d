//! Rotary embedding of one tensor.

use super::{has_dims, same_elem};
use crate::codes::{Done, OP_INVALID, rule};
use crate::executor::{Prepared, input, output};
use crate::operands::Bench;
use crate::tensor::View;

/// Largest head size.
const MAX_HEAD: usize = 1024;

/// `out = x · cos + rotated(x) · sin`; mode 0 pairs the halves, mode 1 neighbors.
pub(crate) fn rotate(x: &View, cos: &View, sin: &View, mode: i64, out: &View) -> Done<Prepared> {
    rule!(matches!(mode, 0 | 1), OP_INVALID, "mode {mode}; 0 half, 1 interleaved");
    rule!(matches!(x.dims.len(), 3 | 4), OP_INVALID, "x has {} dimensions, not 3 or 4", x.dims.len());
    rule!(x.elem.is_float(), OP_INVALID, "x is {:?}", x.elem);
    for (view, what) in [(cos, "cos"), (sin, "sin"), (out, "out")] {
        same_elem(x, view, what)?;
    }
    has_dims(out, &x.dims, "out")?;
    has_dims(sin, &cos.dims, "sin")?;
    let head = x.cols();
    rule!(head.is_multiple_of(2) && head <= MAX_HEAD, OP_INVALID, "heads of {head}; even and at most {MAX_HEAD}");
    let spreads = cos.dims.len() == x.dims.len()
        && cos.cols() == head
        && cos.dims.iter().zip(&x.dims).all(|(&from, &to)| from == to || from == 1);
    rule!(spreads, OP_INVALID, "cos {:?} does not broadcast to {:?}", cos.dims, x.dims);
    let apart = x.address + x.bytes() <= out.address || out.address + out.bytes() <= x.address;
    rule!(apart, OP_INVALID, "out overlaps x");
    let kernel = move |bench: &mut Bench<'_>| {
        let (view, table) = (bench.view(0), bench.view(1));
        let (x, cos, sin) = (bench.floats(0)?, bench.floats(1)?, bench.floats(2)?);
        let mut rotated = vec![0.0; x.len()];
        for row in 0..x.len() / head {
            let (from, angle) = (row * head, table_row(row, &view.dims, &table.dims) * head);
            for i in 0..head {
                let turned = match (mode, i < head / 2, i % 2) {
                    (0, true, _) => -x[from + i + head / 2],
                    (0, false, _) => x[from + i - head / 2],
                    (_, _, 0) => -x[from + i + 1],
                    _ => x[from + i - 1],
                };
                rotated[from + i] = x[from + i] * cos[angle + i] + turned * sin[angle + i];
            }
        }
        bench.store(3, &rotated)
    };
    let operands = vec![input(0, x), input(1, cos), input(2, sin), output(0, out)];
    Ok(Prepared::new(operands, kernel).vector(3 * x.count()))
}

/// Row of the table for a row of x: dimensions of 1 are broadcast.
fn table_row(row: usize, dims: &[usize], table: &[usize]) -> usize {
    let (mut rest, mut step, mut at) = (row, 1, 0);
    for (&dim, &size) in dims.iter().zip(table).rev().skip(1) {
        at += if size == 1 { 0 } else { rest % dim * step };
        rest /= dim;
        step *= size;
    }
    at
}

//! The operations: the arguments that each accepts on a 910B, and its computation in f32, rounded to the stored type.

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod index;
pub(crate) mod matmul;
pub(crate) mod moe;
pub(crate) mod norm;
pub(crate) mod quant;
pub(crate) mod reduce;
pub(crate) mod rope;

use crate::codes::{Done, OP_INVALID, rule};
use crate::tensor::{Elem, View};

/// Checks that two tensors have the same type.
fn same_elem(a: &View, b: &View, what: &str) -> Done {
    rule!(a.elem == b.elem, OP_INVALID, "{what}: {:?} beside {:?}", a.elem, b.elem);
    Ok(())
}

/// Checks that a tensor has one of some types.
fn is_one_of(view: &View, elems: &[Elem], what: &str) -> Done {
    rule!(elems.contains(&view.elem), OP_INVALID, "{what} is {:?}, not one of {elems:?}", view.elem);
    Ok(())
}

/// Checks that a tensor has a shape.
fn has_dims(view: &View, dims: &[usize], what: &str) -> Done {
    rule!(view.dims == dims, OP_INVALID, "{what} is {:?}, not {dims:?}", view.dims);
    Ok(())
}

/// Checks that a tensor has no gaps.
fn is_contiguous(view: &View, what: &str) -> Done {
    rule!(view.is_contiguous(), OP_INVALID, "{what} must be contiguous: {:?} by {:?}", view.dims, view.strides);
    Ok(())
}

/// Sum of products, in eight partial sums that are added last: the same for every row of any batch.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const PARTS: usize = 8;
    let mut parts = [0.0f32; PARTS];
    let (a_parts, b_parts) = (a.chunks_exact(PARTS), b.chunks_exact(PARTS));
    let rest: f32 = a_parts.remainder().iter().zip(b_parts.remainder()).map(|(x, y)| x * y).sum();
    for (xs, ys) in a_parts.zip(b_parts) {
        for (part, (x, y)) in parts.iter_mut().zip(xs.iter().zip(ys)) {
            *part += x * y;
        }
    }
    parts.iter().sum::<f32>() + rest
}

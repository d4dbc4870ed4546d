//! The operations: what each accepts on a 910B, and what it computes. In f32, rounded to the type that is stored.

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

/// Two tensors have the same type.
fn same_elem(a: &View, b: &View, what: &str) -> Done {
    rule!(a.elem == b.elem, OP_INVALID, "{what}: {:?} beside {:?}", a.elem, b.elem);
    Ok(())
}

/// A tensor has one of some types.
fn is_one_of(view: &View, elems: &[Elem], what: &str) -> Done {
    rule!(elems.contains(&view.elem), OP_INVALID, "{what} is {:?}, not one of {elems:?}", view.elem);
    Ok(())
}

/// A tensor has a shape.
fn has_dims(view: &View, dims: &[usize], what: &str) -> Done {
    rule!(view.dims == dims, OP_INVALID, "{what} is {:?}, not {dims:?}", view.dims);
    Ok(())
}

/// A tensor has no gaps.
fn is_contiguous(view: &View, what: &str) -> Done {
    rule!(view.is_contiguous(), OP_INVALID, "{what} must be contiguous: {:?} by {:?}", view.dims, view.strides);
    Ok(())
}

/// Sum of products, in eight parts that are added last: the same for every row, whatever is beside it.
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

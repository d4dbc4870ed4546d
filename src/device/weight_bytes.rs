//! The part of a source's tensor that a weight of a graph is, as every device uploads it.

#![forbid(unsafe_code)]

use std::borrow::Cow;

use super::DeviceError;
use crate::graph::{Weight, WeightSlice};
use crate::weights::{WeightSource, slice};

/// The bytes of a weight, in its own type and shape; copied only if they are a shard by columns.
///
/// # Errors
/// [`DeviceError::Invalid`] names the tensor if the source lacks it, has it in another shape or type, or if it cannot
/// be sharded as the weight requires.
pub(super) fn tensor_part<'a>(source: &'a dyn WeightSource, weight: &Weight) -> Result<Cow<'a, [u8]>, DeviceError> {
    let name = &weight.name;
    let invalid = |what: &str| DeviceError::Invalid { what: format!("tensor {name} {what}") };
    let tensor = source.tensor(name).ok_or_else(|| invalid("is not in the source"))?;
    let mut shape = weight.shape.clone();
    if let Some(WeightSlice { dim, of, .. }) = weight.slice {
        *shape.get_mut(dim).ok_or_else(|| invalid("is cut along a dimension it has not"))? = of;
    }
    if tensor.shape != shape || tensor.dtype != weight.dtype {
        return Err(invalid("has another shape or type than the graph says"));
    }
    let Some(WeightSlice { dim, start, .. }) = weight.slice else { return Ok(Cow::Borrowed(tensor.data)) };
    slice::slice_dim(&tensor, dim, start..start + weight.shape[dim]).ok_or_else(|| invalid("cannot be cut there"))
}

//! Bytes of a graph's weight in a source's tensor; every device uploads weights through this function.

#![forbid(unsafe_code)]

use std::borrow::Cow;

use super::DeviceError;
use crate::graph::{Weight, WeightSlice};
use crate::weights::{WeightSource, slice};

/// Returns the bytes of a weight, in the weight's own type and shape.
///
/// The bytes are copied only if the weight is a slice of the tensor and the slice is not contiguous.
///
/// # Errors
/// [`DeviceError::Invalid`] with the tensor's name if the source does not contain the tensor, if the tensor's shape or
/// type differs from the graph's, or if the weight's slice is out of bounds or splits a block of the storage format.
pub(super) fn tensor_part<'a>(source: &'a dyn WeightSource, weight: &Weight) -> Result<Cow<'a, [u8]>, DeviceError> {
    let name = &weight.name;
    let invalid = |what: &str| DeviceError::Invalid { what: format!("tensor {name} {what}") };
    let tensor = source.tensor(name).ok_or_else(|| invalid("is not in the source"))?;
    let mut shape = weight.shape.clone();
    if let Some(WeightSlice { dim, of, .. }) = weight.slice {
        *shape.get_mut(dim).ok_or_else(|| invalid("has no dimension along which the weight is sliced"))? = of;
    }
    if tensor.shape != shape || tensor.dtype != weight.dtype {
        return Err(invalid("has a shape or type that differs from the graph's"));
    }
    let Some(WeightSlice { dim, start, .. }) = weight.slice else { return Ok(Cow::Borrowed(tensor.data)) };
    slice::slice_dim(&tensor, dim, start..start + weight.shape[dim])
        .ok_or_else(|| invalid("cannot be sliced: the slice is out of bounds or splits a block of the storage format"))
}

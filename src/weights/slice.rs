//! Slices of stored tensors along a dimension.

#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::ops::Range;

use super::TensorView;

/// Returns indices `range` of dimension `dim` of a tensor of one or two dimensions.
///
/// Rows (or elements) are borrowed; columns are copied into one buffer. Returns `None` if the range is out of bounds,
/// or if it splits a block of the storage format.
pub fn slice_dim<'a>(tensor: &TensorView<'a>, dim: usize, range: Range<usize>) -> Option<Cow<'a, [u8]>> {
    let (rows, cols) = match *tensor.shape {
        [len] => (1, len),
        [rows, cols] => (rows, cols),
        _ => return None,
    };
    let by_rows = dim == 0 && tensor.shape.len() == 2;
    let extent = if by_rows { rows } else { cols };
    if dim >= tensor.shape.len() || range.start > range.end || range.end > extent {
        return None;
    }
    let row_bytes = tensor.dtype.bytes_for(cols)?;
    if by_rows {
        return tensor.data.get(range.start * row_bytes..range.end * row_bytes).map(Cow::Borrowed);
    }
    let (skipped, taken) = (tensor.dtype.bytes_for(range.start)?, tensor.dtype.bytes_for(range.len())?);
    if rows == 1 {
        return tensor.data.get(skipped..skipped + taken).map(Cow::Borrowed);
    }
    let rows = tensor.data.chunks_exact(row_bytes);
    Some(Cow::Owned(rows.flat_map(|row| &row[skipped..skipped + taken]).copied().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::DType;

    #[test]
    fn rows_are_borrowed_and_columns_are_whole_blocks() {
        let data: Vec<u8> = (0..3 * 2 * 34).map(|i| u8::try_from(i % 251).unwrap()).collect();
        let tensor = TensorView { dtype: DType::Q8_0, shape: &[3, 64], data: &data };
        assert_eq!(slice_dim(&tensor, 0, 1..3).as_deref(), Some(&data[68..]));
        let columns = slice_dim(&tensor, 1, 32..64).unwrap();
        let expected: Vec<u8> =
            [34..68, 102..136, 170..204].into_iter().flat_map(|range| data[range].to_vec()).collect();
        assert_eq!(*columns, expected);
        for (dim, range) in [(1, 16..48), (0, 2..4), (1, 0..65), (2, 0..1)] {
            assert!(slice_dim(&tensor, dim, range.clone()).is_none(), "{dim} {range:?}");
        }
        let bytes = [1u8, 0, 2, 0, 3, 0];
        let vector = TensorView { dtype: DType::F16, shape: &[3], data: &bytes };
        assert_eq!(slice_dim(&vector, 0, 1..3).as_deref(), Some(&bytes[2..]));
    }
}

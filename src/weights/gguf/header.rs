//! Header of a GGUF file (magic, version, counts, metadata, tensor table), with complete checks.
//!
//! After [`parse`], every tensor is within the file, at the file's alignment, does not overlap another tensor, and has
//! the size that its type and shape require.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::metadata::Metadata;
use super::reader::Reader;
use super::types::GgmlType;
use crate::weights::WeightError;
use crate::weights::mmap::FileMap;

const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment of tensor data if `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest number of dimensions of a tensor (`GGML_MAX_DIMS`).
const MAX_DIMS: usize = 4;
/// Size of the smallest tensor record: an empty name, no dimensions, type and offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// Record of the tensor table.
#[derive(Clone, Debug)]
pub(super) struct TensorInfo {
    /// Range of the name in the file.
    pub(super) name: Range<usize>,
    dims: [usize; MAX_DIMS],
    rank: usize,
    pub(super) ty: GgmlType,
    /// Range of the data in the file.
    pub(super) data: Range<usize>,
}

impl TensorInfo {
    /// Returns the row-major shape, slowest dimension first.
    pub(super) fn shape(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}

/// Parses and checks everything before the tensor data.
pub(super) fn parse(file: &Arc<FileMap>) -> Result<(Metadata, Vec<TensorInfo>), WeightError> {
    let corrupt = |what| WeightError::Corrupt { path: file.path().to_owned(), what };
    let unsupported = |what| WeightError::Unsupported { path: file.path().to_owned(), what };
    let bytes = file.bytes();
    let mut reader = Reader::new(bytes);

    let magic: [u8; 4] = reader.array("magic").map_err(corrupt)?;
    if magic != MAGIC {
        return Err(corrupt(format!("the file begins with {:?}, expected \"GGUF\"", magic.escape_ascii().to_string())));
    }
    let version = reader.u32("version").map_err(corrupt)?;
    match version {
        2 | 3 => {}
        _ if version.trailing_zeros() >= 16 && version != 0 => {
            let version = version.swap_bytes();
            let what = format!("the file is a big-endian GGUF file (version {version}), expected a little-endian file");
            return Err(unsupported(what));
        }
        _ => return Err(unsupported(format!("the GGUF version is {version}, expected 2 or 3"))),
    }
    let tensor_count = reader.u64("tensor count").map_err(corrupt)?;
    let pair_count = reader.u64("metadata count").map_err(corrupt)?;
    // The tensor table comes after the metadata, but its minimal size is already known.
    if tensor_count > reader.remaining() as u64 / MIN_TENSOR_BYTES {
        let left = reader.remaining();
        return Err(corrupt(format!(
            "the header contains a count of {tensor_count} tensors, but only {left} bytes are left"
        )));
    }
    let metadata = Metadata::read(file, &mut reader, pair_count).map_err(corrupt)?;
    if let Some(parts) = metadata.u32("split.count")
        && parts > 1
    {
        let what =
            format!("the file is one of {parts} parts (split.count), expected a single file: merge the parts first");
        return Err(unsupported(what));
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(value) => match value.as_int().and_then(|value| u64::try_from(value).ok()) {
            Some(alignment) if alignment.is_power_of_two() => alignment,
            _ => return Err(corrupt(format!("general.alignment is {value:?}, expected a power of two"))),
        },
    };

    // The count was checked against the remaining bytes, so it fits into usize.
    let mut records = Vec::with_capacity(usize::try_from(tensor_count).unwrap_or_default());
    for index in 0..tensor_count {
        records.push(Record::read(&mut reader, index).map_err(corrupt)?);
    }
    let data_start = (reader.at() as u64).checked_next_multiple_of(alignment);
    let mut tensors = Vec::with_capacity(records.len());
    for record in records {
        let name = &bytes[record.name.clone()];
        let name = std::str::from_utf8(name).unwrap_or_default();
        let Some(ty) = GgmlType::from_id(record.type_id) else {
            let (path, tensor) = (file.path().to_owned(), name.to_owned());
            let type_id = Some(record.type_id);
            return Err(WeightError::UnsupportedType { path, tensor, type_id, type_name: "unknown".to_owned() });
        };
        let tensor = record.place(ty, data_start, alignment, bytes.len());
        tensors.push(tensor.map_err(|what| corrupt(format!("tensor {name:?} {what}")))?);
    }
    check_apart(bytes, &tensors).map_err(corrupt)?;
    Ok((metadata, tensors))
}

/// Tensor record whose type, shape and offset are not checked yet.
struct Record {
    name: Range<usize>,
    dims: [usize; MAX_DIMS],
    rank: usize,
    type_id: u32,
    offset: u64,
}

impl Record {
    fn read(reader: &mut Reader<'_>, index: u64) -> Result<Self, String> {
        let at_index = |what: String| format!("tensor {index}: {what}");
        let name = reader.string("tensor name").map_err(at_index)?;
        let name_range = reader.at() - name.len()..reader.at();
        let in_tensor = |what: String| format!("tensor {name:?}: {what}");
        let rank = reader.u32("number of dimensions").map_err(in_tensor)?;
        let rank = usize::try_from(rank).ok().filter(|rank| *rank <= MAX_DIMS);
        let Some(rank) = rank else {
            return Err(format!("tensor {name:?} has more than {MAX_DIMS} dimensions"));
        };
        let mut dims = [0; MAX_DIMS];
        // The file stores the fastest dimension first.
        for dim in dims[..rank].iter_mut().rev() {
            let value = reader.u64("dimension").map_err(in_tensor)?;
            *dim = usize::try_from(value)
                .map_err(|_| format!("tensor {name:?} has a dimension of {value}, expected at most usize::MAX"))?;
        }
        let type_id = reader.u32("type").map_err(in_tensor)?;
        let offset = reader.u64("offset").map_err(in_tensor)?;
        Ok(Self { name: name_range, dims, rank, type_id, offset })
    }

    fn place(
        self,
        ty: GgmlType,
        data_start: Option<u64>,
        alignment: u64,
        file_len: usize,
    ) -> Result<TensorInfo, String> {
        let shape = &self.dims[..self.rank];
        if shape.contains(&0) {
            return Err(format!("has shape {shape:?}, expected no dimension of 0"));
        }
        let row = shape.last().copied().unwrap_or(1);
        if row % ty.block_len != 0 {
            return Err(format!("has rows of {row} elements, expected a multiple of {} for {}", ty.block_len, ty.name));
        }
        let elements = shape.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
        let len = elements.and_then(|elements| (elements / ty.block_len).checked_mul(ty.block_bytes));
        let Some(len) = len else {
            return Err(format!("has shape {shape:?}, which is larger than any file"));
        };
        if !self.offset.is_multiple_of(alignment) {
            return Err(format!("has offset {}, expected a multiple of the alignment {alignment}", self.offset));
        }
        let start = data_start.and_then(|data_start| data_start.checked_add(self.offset));
        let start = start.and_then(|start| usize::try_from(start).ok());
        let end = start.and_then(|start| start.checked_add(len)).filter(|end| *end <= file_len);
        let (Some(start), Some(end)) = (start, end) else {
            let offset = self.offset;
            return Err(format!(
                "has {len} bytes at offset {offset}, which is beyond the end of the file of {file_len} bytes"
            ));
        };
        Ok(TensorInfo { name: self.name, dims: self.dims, rank: self.rank, ty, data: start..end })
    }
}

/// Checks that no two tensors have the same name or overlap.
fn check_apart(bytes: &[u8], tensors: &[TensorInfo]) -> Result<(), String> {
    let name = |tensor: &TensorInfo| bytes[tensor.name.clone()].escape_ascii().to_string();
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| (tensor.data.start, tensor.data.end));
    if let Some(pair) = order.windows(2).find(|pair| pair[1].data.start < pair[0].data.end) {
        return Err(format!("tensor {:?} overlaps {:?}", name(pair[1]), name(pair[0])));
    }
    order.sort_unstable_by_key(|tensor| &bytes[tensor.name.clone()]);
    if let Some(pair) = order.windows(2).find(|pair| bytes[pair[0].name.clone()] == bytes[pair[1].name.clone()]) {
        return Err(format!("tensor {:?} is listed twice", name(pair[0])));
    }
    Ok(())
}

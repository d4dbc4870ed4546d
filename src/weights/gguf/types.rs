//! GGML's numbers of tensor types: the supported types, and the sizes of types that are only recognized.
//!
//! Source: `enum ggml_type` in ggml's `ggml.h` and the block structs of `ggml-common.h`. Numbers 4, 5, 31 to 33 and 36
//! to 38 were removed from the format.

#![forbid(unsafe_code)]

use crate::weights::DType;

/// Tensor type of a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GgmlType {
    pub(super) id: u32,
    pub(super) name: &'static str,
    pub(super) block_len: usize,
    pub(super) block_bytes: usize,
    /// The same type as a [`DType`], or `None` if the type is only recognized.
    pub(super) dtype: Option<DType>,
}

impl GgmlType {
    pub(super) fn from_id(id: u32) -> Option<Self> {
        let dtype = match id {
            0 => DType::F32,
            1 => DType::F16,
            2 => DType::Q4_0,
            3 => DType::Q4_1,
            6 => DType::Q5_0,
            7 => DType::Q5_1,
            8 => DType::Q8_0,
            12 => DType::Q4_K,
            13 => DType::Q5_K,
            14 => DType::Q6_K,
            30 => DType::BF16,
            _ => return Self::recognized(id),
        };
        let (block_len, block_bytes) = (dtype.block_len(), dtype.block_bytes());
        Some(Self { id, name: dtype.name(), block_len, block_bytes, dtype: Some(dtype) })
    }

    fn recognized(id: u32) -> Option<Self> {
        let (name, block_len, block_bytes) = match id {
            9 => ("q8_1", 32, 36),
            10 => ("q2_k", 256, 84),
            11 => ("q3_k", 256, 110),
            15 => ("q8_k", 256, 292),
            16 => ("iq2_xxs", 256, 66),
            17 => ("iq2_xs", 256, 74),
            18 => ("iq3_xxs", 256, 98),
            19 => ("iq1_s", 256, 50),
            20 => ("iq4_nl", 32, 18),
            21 => ("iq3_s", 256, 110),
            22 => ("iq2_s", 256, 82),
            23 => ("iq4_xs", 256, 136),
            24 => ("i8", 1, 1),
            25 => ("i16", 1, 2),
            26 => ("i32", 1, 4),
            27 => ("i64", 1, 8),
            28 => ("f64", 1, 8),
            29 => ("iq1_m", 256, 56),
            34 => ("tq1_0", 256, 54),
            35 => ("tq2_0", 256, 66),
            39 => ("mxfp4", 32, 17),
            _ => return None,
        };
        Some(Self { id, name, block_len, block_bytes, dtype: None })
    }
}

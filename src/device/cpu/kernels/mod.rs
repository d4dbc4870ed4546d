//! The kernels: one file per operation, over rows, panels or the KV cache; each file holds a plain reference and the
//! fast implementation.
//!
//! `matmul` multiplies rows by packed panels, `attention` reads the pool of `kv_cache`, the others work row by row.

pub mod activation;
pub mod argmax;
pub mod attention;
pub mod cast;
pub mod exp;
pub mod float_rows;
pub mod kv_cache;
pub mod matmul;
pub mod norm;
pub mod q8_rows;
pub mod quantize;
pub mod rope;

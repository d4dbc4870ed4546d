//! Options for opening an Ascend device, and the errors of opening one.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use ascend_sys::{AscendError, LoadError};

/// Element type of activations, 16-bit weights and logits; sums are f32 inside the chip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activations {
    /// bf16 if most of the model's matrices are bf16, else f16.
    #[default]
    Auto,
    /// Half precision: 11 bits, at most 65,504. A row that exceeds it becomes infinite and ends its request.
    F16,
    /// bfloat16: 8 bits, the range of f32.
    BF16,
}

/// Storage of the matrices of quantized files.
///
/// Embedding tables, and output projections tied to one, are stored in 16 bits: rows are gathered from them, and a
/// second copy for the product would cost more memory than it saves time. A matrix whose form the card's operations do
/// not support (more than 65,535 rows, for example) is stored in 16 bits, and the device's notes give the reason. Bits
/// are per weight, scales and offsets included; activations have 16 bits each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightForm {
    /// Weights only (W4A16, W8A16), in groups of 32 with scales of 16 bits. In f16:
    /// - 4.5 bits for `Q4_0`, 8.5 for `Q5_0` and `Q8_0`: the exact values.
    /// - 5 bits for `Q4_1` and `Q4_K`, 9 for `Q5_1` and `Q5_K`: scale and offset are rounded, each to 11 bits.
    /// - 8.5 bits for `Q6_K`: of two groups of 16 the one with the larger step keeps its values, the other's move by at
    ///   most
    ///   an eighth of that step (its lowest by a quarter, if the signs of the steps differ). Scales are rounded to 11 bits.
    ///
    /// With bf16 activations scales and offsets are rounded to 8 bits.
    #[default]
    WeightOnly,
    /// Weights and activations in int8 (W8A8): about 8 bits. The rounding error is up to 1/254 of the largest weight of
    /// a row and of the largest activation. The fastest and least accurate form for large batches.
    Dynamic,
    /// Converted to the element type of the activations: 16 bits.
    Widened,
}

/// Which matrices are stored in the chip's tiles (`FRACTAL_NZ`) instead of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightTiles {
    /// No matrix.
    Never,
    /// Matrices multiplied in int8 ([`WeightForm::Dynamic`]), as in vllm-ascend on a 910B.
    #[default]
    Int8,
    /// Matrices multiplied in int8 or in 16 bits, except embedding tables.
    Always,
}

/// Options of an [`AscendDevice`](super::AscendDevice). Start from `default()` and assign fields.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AscendOptions {
    /// `libascendcl.so`, or a folder that contains it; `None` = the location of CANN. If set, no other location is
    /// tried.
    pub library: Option<PathBuf>,
    /// `libdcmi.so`, the management library; `None` = the location of the driver. It is only needed to measure energy.
    pub dcmi_library: Option<PathBuf>,
    /// Cards by the runtime's numbers, which depend on `ASCEND_RT_VISIBLE_DEVICES`.
    ///
    /// With several cards, a model needs as many ranks (`EngineConfig::tensor_parallel_size`): one per card in this
    /// order, connected by HCCL.
    pub cards: Vec<u32>,
    /// Longest time in microseconds that the host waits for queued work before it reports a hang. A step of a large
    /// prompt takes a few seconds at most.
    pub timeout_us: u64,
    /// Element type of activations.
    pub activations: Activations,
    /// Storage of the matrices of quantized files.
    pub weights: WeightForm,
    /// Which matrices are stored in tiles.
    pub tiles: WeightTiles,
    /// Whether decode steps are captured into graphs, if the runtime supports it.
    pub capture: bool,
    /// Maximum number of rows of a captured decode step: each bucket up to it gets a graph at its first use. Graphs
    /// need streams and memory; larger batches are bound by the chip, not by the host.
    pub capture_max_rows: u32,
    /// Requests kernels whose sums do not depend on timing, which are slower.
    pub deterministic: bool,
}

impl Default for AscendOptions {
    fn default() -> Self {
        Self {
            library: None,
            dcmi_library: None,
            cards: vec![0],
            timeout_us: 60_000_000,
            activations: Activations::default(),
            weights: WeightForm::default(),
            tiles: WeightTiles::default(),
            capture: true,
            capture_max_rows: 64,
            deterministic: false,
        }
    }
}

impl AscendOptions {
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_micros(self.timeout_us.max(1000))
    }
}

/// Reason why an Ascend device could not be opened. There is no fallback to another device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AscendOpenError {
    /// `AscendCL` is not installed, or lacks a required function.
    #[error(transparent)]
    Library(#[from] LoadError),
    /// The libraries lack operations that every model needs.
    #[error("{} lacks operations that every model needs: {}", library.display(), names.join(", "))]
    MissingOperations {
        /// Location of the libraries.
        library: PathBuf,
        /// Names of the missing functions.
        names: Vec<&'static str>,
    },
    /// The card does not exist.
    #[error("card {card} does not exist: this process may use {count}")]
    Card {
        /// The requested number.
        card: u32,
        /// Number of cards.
        count: u32,
    },
    /// Cards that cannot be used together.
    #[error("cards {cards:?} were requested; expected at least one card, without duplicates")]
    Cards {
        /// The requested numbers.
        cards: Vec<u32>,
    },
    /// A call of the runtime failed.
    #[error("card {card}: {source}")]
    Call {
        /// Number of the card.
        card: u32,
        /// The call, its error code and the runtime's message.
        source: AscendError,
    },
    /// The device's thread could not be started.
    #[error("the device's thread could not be started: {reason}")]
    Thread {
        /// The system's error message.
        reason: String,
    },
}

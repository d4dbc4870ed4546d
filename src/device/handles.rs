//! Owned handles of device resources; each handle releases its resource on drop.

use std::sync::Arc;

use super::{BufferId, Device, DeviceError, MemKind, ProgramId, Span, WeightSetId};
use crate::graph::{CompileError, Plan, Weight};
use crate::kv_cache::KvGeometry;
use crate::weights::WeightSource;

/// Device buffer that is freed on drop.
#[derive(Debug)]
pub struct OwnedBuffer {
    device: Arc<dyn Device>,
    id: BufferId,
    bytes: u64,
}

impl OwnedBuffer {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// The errors of [`Device::alloc`].
    pub fn new(device: &Arc<dyn Device>, bytes: u64, kind: MemKind) -> Result<Self, DeviceError> {
        Ok(Self { device: Arc::clone(device), id: device.alloc(bytes, kind)?, bytes })
    }

    /// Returns the span of the whole buffer.
    pub const fn span(&self) -> Span {
        Span { buffer: self.id, offset: 0, bytes: self.bytes }
    }

    /// Returns the span of the first `bytes` bytes.
    ///
    /// # Panics
    /// If the buffer has fewer than `bytes` bytes.
    pub fn prefix(&self, bytes: u64) -> Span {
        assert!(bytes <= self.bytes, "a prefix of {bytes} bytes exceeds the buffer of {} bytes", self.bytes);
        Span { buffer: self.id, offset: 0, bytes }
    }
}

impl Drop for OwnedBuffer {
    fn drop(&mut self) {
        self.device.free(self.id);
    }
}

/// Weight set that is released on drop.
#[derive(Debug)]
pub struct OwnedWeights {
    device: Arc<dyn Device>,
    id: WeightSetId,
}

impl OwnedWeights {
    /// Packs and uploads the weights of one rank.
    ///
    /// # Errors
    /// The errors of [`Device::upload`].
    pub fn upload(
        device: &Arc<dyn Device>,
        source: &dyn WeightSource,
        weights: &[Weight],
        rank: u32,
    ) -> Result<Self, DeviceError> {
        Ok(Self { device: Arc::clone(device), id: device.upload(source, weights, rank)? })
    }

    /// Returns the id of the weight set.
    pub const fn id(&self) -> WeightSetId {
        self.id
    }
}

impl Drop for OwnedWeights {
    fn drop(&mut self) {
        self.device.release_weights(self.id);
    }
}

/// Loaded program that is unloaded on drop; it keeps its weight sets alive.
#[derive(Debug)]
pub struct OwnedProgram {
    device: Arc<dyn Device>,
    id: ProgramId,
    _weights: Vec<Arc<OwnedWeights>>,
}

impl OwnedProgram {
    /// Loads one plan per rank, each with its uploaded weights.
    ///
    /// # Errors
    /// The errors of [`Device::load`].
    pub fn load(
        device: &Arc<dyn Device>,
        plans: &[Plan],
        weights: &[Arc<OwnedWeights>],
        kv: &KvGeometry,
    ) -> Result<Self, CompileError> {
        let ids: Vec<WeightSetId> = weights.iter().map(|set| set.id()).collect();
        let id = device.load(plans, &ids, kv)?;
        Ok(Self { device: Arc::clone(device), id, _weights: weights.to_vec() })
    }

    /// Returns the id of the program.
    pub const fn id(&self) -> ProgramId {
        self.id
    }
}

impl Drop for OwnedProgram {
    fn drop(&mut self) {
        self.device.unload(self.id);
    }
}

//! Handles that release their id on drop.

use std::sync::Arc;

use super::{BufferId, Device, DeviceError, MemKind, ProgramId, Span, WeightSetId};
use crate::graph::{CompileError, Plan, Weight};
use crate::kv_cache::KvGeometry;
use crate::weights::WeightSource;

/// A buffer freed on drop.
#[derive(Debug)]
pub struct OwnedBuffer {
    device: Arc<dyn Device>,
    id: BufferId,
    bytes: u64,
}

impl OwnedBuffer {
    /// Reserves zeroed memory.
    pub fn new(device: &Arc<dyn Device>, bytes: u64, kind: MemKind) -> Result<Self, DeviceError> {
        Ok(Self { device: Arc::clone(device), id: device.alloc(bytes, kind)?, bytes })
    }

    /// The whole buffer.
    pub const fn span(&self) -> Span {
        Span { buffer: self.id, offset: 0, bytes: self.bytes }
    }

    /// The first `bytes` of it.
    ///
    /// # Panics
    /// If the buffer is smaller.
    pub fn prefix(&self, bytes: u64) -> Span {
        assert!(bytes <= self.bytes, "span of {bytes} in a buffer of {}", self.bytes);
        Span { buffer: self.id, offset: 0, bytes }
    }
}

impl Drop for OwnedBuffer {
    fn drop(&mut self) {
        self.device.free(self.id);
    }
}

/// Weights released on drop.
#[derive(Debug)]
pub struct OwnedWeights {
    device: Arc<dyn Device>,
    id: WeightSetId,
}

impl OwnedWeights {
    /// Packs the weights of a rank.
    pub fn upload(
        device: &Arc<dyn Device>,
        source: &dyn WeightSource,
        weights: &[Weight],
        rank: u32,
    ) -> Result<Self, DeviceError> {
        Ok(Self { device: Arc::clone(device), id: device.upload(source, weights, rank)? })
    }

    /// The set.
    pub const fn id(&self) -> WeightSetId {
        self.id
    }
}

impl Drop for OwnedWeights {
    fn drop(&mut self) {
        self.device.release_weights(self.id);
    }
}

/// A program unloaded on drop, keeping its weights.
#[derive(Debug)]
pub struct OwnedProgram {
    device: Arc<dyn Device>,
    id: ProgramId,
    _weights: Vec<Arc<OwnedWeights>>,
}

impl OwnedProgram {
    /// Loads plans over uploaded weights, one of each a rank.
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

    /// The program.
    pub const fn id(&self) -> ProgramId {
        self.id
    }
}

impl Drop for OwnedProgram {
    fn drop(&mut self) {
        self.device.unload(self.id);
    }
}

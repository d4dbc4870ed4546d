//! Checks a graph against the operations of a device.

use crate::graph::{ActivationType, CompileError, Graph, Op};

/// A set of operations, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpSet(u64);

impl OpSet {
    /// All operations.
    pub const ALL: Self = Self(u64::MAX);

    /// Removes these operations from the set; unknown names have no effect.
    #[must_use]
    pub fn without(self, names: &[&str]) -> Self {
        let bits = Op::NAMES.iter().enumerate().filter(|(_, name)| names.contains(name));
        Self(bits.fold(self.0, |set, (index, _)| set & !(1 << index)))
    }

    /// Whether the set contains an operation of this name.
    pub fn contains(self, name: &str) -> bool {
        Op::NAMES.iter().position(|known| *known == name).is_some_and(|index| self.0 & (1 << index) != 0)
    }
}

/// Rewrites operations that the device lacks, and refuses the rest.
///
/// Loop orders of attention are dropped if a device has none of its own, since they do not change results.
/// [`fuse`](super::fuse()) never creates a fused operation that the device lacks, so an operation that is missing here
/// has no replacement.
///
/// # Errors
/// [`CompileError::Unsupported`] names the operation.
pub fn legalize(graph: &Graph, ops: OpSet, has_schedules: bool) -> Result<Graph, CompileError> {
    let mut out = graph.clone();
    for node in &mut out.nodes {
        let name = node.op.name();
        if !ops.contains(name) {
            let reason =
                format!("it is not among the device's operations and cannot be replaced by others{}", at(node.layer));
            return Err(CompileError::Unsupported { op: name, reason });
        }
        match &mut node.op {
            Op::Attention(shape) if !has_schedules => shape.schedules = None,
            Op::Cast(ActivationType::F32) => {
                return Err(CompileError::Invalid(format!("a cast to f32{}", at(node.layer))));
            }
            _ => {}
        }
    }
    Ok(out)
}

fn at(layer: Option<u32>) -> String {
    layer.map_or(String::new(), |layer| format!(" (layer {layer})"))
}

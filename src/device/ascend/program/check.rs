//! Checks of a plan before it is lowered: support by the chip, kinds of rotation, and products that can be merged.

#![forbid(unsafe_code)]

use ascend_sys::ElemType;

use crate::device::ascend::weights::WeightSet;
use crate::device::ascend::weights::layout::Matrix;
use crate::graph::{ActivationKind, ActivationType, CompileError, Op, OverflowPolicy, Plan, RopeStyle};

/// Finds gate and up projections with adjacent weights whose results only one gated product reads: they become one
/// product, and SwiGLU reads its halves.
pub(crate) fn fuse_gate_up(plan: &Plan, weights: &WeightSet) -> (Vec<Option<Matrix>>, Vec<bool>) {
    let count = plan.steps.len();
    let (mut joined, mut halves) = (vec![None; count], vec![false; count]);
    for (at, step) in plan.steps.iter().enumerate() {
        let Op::LinearMulti(parts) = &step.op else { continue };
        let ([gate, up], [gate_part, up_part]) = (&step.outputs[..], &parts[..]) else { continue };
        if gate_part.bias.is_some() || up_part.bias.is_some() {
            continue;
        }
        let readers: Vec<usize> =
            (0..count).filter(|&at| plan.steps[at].inputs.iter().any(|input| input == gate || input == up)).collect();
        let [reader] = readers[..] else { continue };
        let is_swiglu = matches!(
            plan.steps[reader].op,
            Op::ActMul(ActivationKind::Silu) | Op::SwigluLinear { activation: ActivationKind::Silu, .. }
        );
        if !is_swiglu || plan.steps[reader].inputs[..] != [*gate, *up] {
            continue;
        }
        if weights.rows(gate_part.weight) != weights.rows(up_part.weight) {
            continue;
        }
        joined[at] = weights.fused(&[gate_part.weight, up_part.weight]);
        halves[reader] = joined[at].is_some();
    }
    (joined, halves)
}

/// Refuses plans that the chip's operations do not support: activations of another type than the weights were uploaded
/// for, saturation instead of infinity, heads that rotate in part.
pub(crate) fn check_plan(plan: &Plan, elem: ElemType) -> Result<(), CompileError> {
    let refuse = |op: &'static str, reason: String| Err(CompileError::Unsupported { op, reason });
    let own = if elem == ElemType::BF16 { ActivationType::BF16 } else { ActivationType::F16 };
    if plan.overflow == OverflowPolicy::Clamp {
        let (option, value) = ("overflow", "clamp".to_owned());
        let expected = "`error` on this device, where an overflowing value becomes infinite";
        return Err(CompileError::Option { option, value, expected });
    }
    for step in &plan.steps {
        let name = step.op.name();
        let to = match &step.op {
            Op::Cast(to) | Op::NormCast { to, .. } | Op::AddRmsNorm { to, .. } | Op::SwigluLinear { to, .. } => {
                Some(*to)
            }
            _ => None,
        };
        if let Some(to) = to.filter(|&to| to != ActivationType::F32 && to != own) {
            let (to, own) = (to.name(), own.name());
            return refuse(name, format!("precision {to}: this model has {own} activations on this device"));
        }
        match &step.op {
            Op::Rope { head_dim, .. } | Op::QkNormRope { head_dim, .. } | Op::RopeKvWrite { head_dim, .. } => {
                let angles = plan.values[step.inputs[1]].cols;
                if angles != *head_dim {
                    return refuse(name, format!("heads of {head_dim} elements of which {angles} rotate"));
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Pairing and head size of each rotary table.
pub(crate) fn rope_styles(plan: &Plan) -> Result<Vec<(usize, bool)>, CompileError> {
    let mut styles = vec![None; plan.ropes.len()];
    for step in &plan.steps {
        let (Op::Rope { head_dim, style }
        | Op::QkNormRope { head_dim, style, .. }
        | Op::RopeKvWrite { head_dim, style, .. }) = &step.op
        else {
            continue;
        };
        let writer = plan.steps.iter().find(|writer| writer.outputs.contains(&step.inputs[1]));
        let Some(Op::RopeAngles { rope }) = writer.map(|writer| &writer.op) else { continue };
        let found = (*head_dim, *style == RopeStyle::Interleaved);
        if styles[*rope].is_some_and(|known| known != found) {
            let reason = "one table of frequencies with two pairings".to_owned();
            return Err(CompileError::Unsupported { op: step.op.name(), reason });
        }
        styles[*rope] = Some(found);
    }
    Ok(styles.into_iter().map(|style| style.unwrap_or((2, false))).collect())
}

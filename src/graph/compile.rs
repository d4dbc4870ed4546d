//! Compiles a graph to a plan: the passes in order, then streams and memory.

use crate::graph::passes::{PrecisionPolicy, apply_precision, fuse, legalize};
use crate::graph::plan::memory::{lower_bound_bytes, plan_arena, plan_without_reuse};
use crate::graph::plan::streams::assign_streams;
use crate::graph::plan::verify::{counts, fits};
use crate::graph::{
    Bucket, CompileError, CompileOptions, Elem, Graph, Io, Node, Numerics, Op, Operand, Plan, PlanValue, RegisteredOp,
    Step, Target, Value, ValueId,
};

/// Compiles a graph: precision, fusion, legalization, streams, memory plan. A pure function: equal arguments give equal
/// plans. [`shard`](super::passes::shard()) produces the graph of a rank.
///
/// # Errors
/// [`CompileError`] names the option, operation or size that the target does not allow.
pub fn compile(
    graph: &Graph,
    target: Target,
    numerics: Numerics,
    options: &CompileOptions,
    bucket: Bucket,
) -> Result<Plan, CompileError> {
    options.validate(numerics)?;
    let (fusion, memory_reuse) = (options.resolved_fusion(), options.resolved_memory_reuse());
    if !target.alignment.is_power_of_two() || target.alignment < 64 {
        return Err(CompileError::Invalid(format!(
            "alignment {} is not a power of two of at least 64",
            target.alignment
        )));
    }
    let policy = PrecisionPolicy::new(options, numerics, target);
    let graph = apply_precision(graph, &policy)?;
    let (graph, fused) = fuse(&graph, fusion, target.ops, options.attention);
    let graph = legalize(&graph, target.ops, target.attention_schedules)?;
    check_customs(&graph)?;

    let mut plan = Plan {
        values: graph.values.iter().map(unplaced).collect(),
        steps: Vec::with_capacity(graph.nodes.len()),
        weights: graph.weights.clone(),
        ropes: graph.ropes.clone(),
        bucket,
        arena_bytes: 0,
        arena_bound_bytes: 0,
        alignment: target.alignment,
        fusion,
        streams: options.resolved_parallel_ops(),
        memory_reuse,
        fused,
        vocab_size: graph.vocab_size,
        customs: graph.customs.clone(),
        rank: graph.rank,
        overflow: options.resolved_overflow(),
    };
    let lanes = assign_streams(&needs(&graph), usize::from(plan.streams));
    for (node, placement) in graph.nodes.iter().zip(lanes) {
        let scratch = scratch_of(&graph, node).map(|value| {
            plan.values.push(unplaced(&value));
            plan.values.len() - 1
        });
        // Logits and argmax ids are outputs of the plan, whichever node computes them.
        let leaving = match node.op {
            Op::ArgMax => Some((node.inputs[0], node.outputs[0])),
            Op::LinearArgMax(_) => Some((node.outputs[0], node.outputs[1])),
            _ => None,
        };
        if let Some((logits, best)) = leaving {
            plan.values[logits.0 as usize].operand = Operand::Io(Io::Logits);
            plan.values[best.0 as usize].operand = Operand::Io(Io::ArgMax);
        }
        let index = |ids: &[ValueId]| ids.iter().map(|id| id.0 as usize).collect();
        plan.steps.push(Step {
            op: node.op.clone(),
            inputs: index(&node.inputs),
            outputs: index(&node.outputs),
            scratch,
            layer: node.layer,
            stream: placement.stream,
            waits_on: placement.waits_on,
        });
    }
    if !counts(&bucket) {
        return Err(CompileError::Invalid(format!("{bucket:?} exceeds 32-bit counts")));
    }
    if let Some(value) = plan.values.iter().find(|value| !fits(value, &bucket)) {
        let (rows, cols) = (bucket.rows(value.rows), value.cols);
        return Err(CompileError::Invalid(format!("{} of {rows} rows of {cols} is too large", value.name)));
    }
    plan.arena_bound_bytes = lower_bound_bytes(&plan.values, &plan.steps, &bucket, target.alignment);
    let place = if memory_reuse { plan_arena } else { plan_without_reuse };
    plan.arena_bytes = place(&mut plan.values, &plan.steps, &bucket, target.alignment);
    if cfg!(debug_assertions) {
        plan.check()?;
    }
    Ok(plan)
}

fn unplaced(value: &Value) -> PlanValue {
    let operand = if value.elem == Elem::Effect { Operand::Effect } else { Operand::Arena { offset: 0 } };
    PlanValue { name: value.name.clone(), rows: value.rows, cols: value.cols, elem: value.elem, operand }
}

/// For each node, the nodes whose results it reads, by index. A custom operation depends on all nodes before it, and
/// all nodes after it depend on it: the plan is split there. All ranks reach a collective at the same place.
fn needs(graph: &Graph) -> Vec<Vec<usize>> {
    let mut writer = vec![None; graph.values.len()];
    let (mut needs, mut cut) = (Vec::with_capacity(graph.nodes.len()), 0);
    for (at, node) in graph.nodes.iter().enumerate() {
        let cuts = matches!(node.op, Op::Custom(_)) || node.op.is_collective();
        let mut needed: Vec<usize> = node.inputs.iter().filter_map(|id| writer[id.0 as usize]).collect();
        if cuts {
            needed.extend(cut..at);
            cut = at;
        } else if at > 0 && cut > 0 {
            needed.push(cut);
        }
        needed.sort_unstable();
        needed.dedup();
        needs.push(needed);
        node.outputs.iter().for_each(|id| writer[id.0 as usize] = Some(at));
    }
    needs
}

/// Checks whether the custom operations support this graph.
fn check_customs(graph: &Graph) -> Result<(), CompileError> {
    for node in &graph.nodes {
        let Op::Custom(index) = node.op else { continue };
        let refuse = |name: &str, reason| CompileError::Custom { name: name.to_owned(), reason };
        let Some(RegisteredOp { op, .. }) = graph.customs.get(index) else {
            return Err(refuse(
                "?",
                format!("index {index} is out of range: {} operations are registered", graph.customs.len()),
            ));
        };
        op.check(graph.value(node.inputs[0]).cols).map_err(|error| refuse(op.name(), error.to_string()))?;
    }
    Ok(())
}

/// Scratch of a fused MLP for its activated product.
fn scratch_of(graph: &Graph, node: &Node) -> Option<Value> {
    let Op::SwigluLinear { to, .. } = node.op else { return None };
    let gate = graph.value(node.inputs[0]);
    Some(Value {
        name: format!("scratch.{}", graph.value(node.outputs[0]).name),
        rows: gate.rows,
        cols: gate.cols,
        elem: to.elem(),
    })
}

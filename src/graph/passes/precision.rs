//! Chooses the type that activations are rounded to before a product with weights.
//!
//! Everything else is unchanged: sums, norms, rotation, softmax, residual sums and logits are f32 under every policy.
//! The type of the KV cache determines the type of keys and values.

use crate::num::to_u32;
use std::collections::{BTreeMap, HashMap};

use crate::graph::{
    ActivationType, CompileError, CompileOptions, Graph, LinearPart, Node, Numerics, Op, Precision, Target, Value,
    ValueId,
};
use crate::weights::DType;

/// Default precision of products, and exceptions by the name of the projection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrecisionPolicy<'a> {
    /// Precision of projections without an exception.
    pub default: Precision,
    /// Exceptions by projection: a name such as `q_proj` or `lm_head`, or the end of its path such as
    /// `layers.3.mlp.down_proj`.
    pub overrides: &'a BTreeMap<String, Precision>,
    /// Whether `mix` may round to int8 before integer weights.
    pub int8_activations: bool,
    /// Whether `mix` rounds to bfloat16 before bf16 weights.
    pub bf16_activations: bool,
}

impl<'a> PrecisionPolicy<'a> {
    /// Policy of the options for a device.
    pub fn new(options: &'a CompileOptions, numerics: Numerics, target: Target) -> Self {
        Self {
            default: options.resolved_precision(numerics),
            overrides: &options.precision_overrides,
            int8_activations: target.int8_activations,
            bf16_activations: target.bf16_activations,
        }
    }
}

/// Inserts casts before the products that need narrower activations; readers of the same value with the same type share
/// one cast.
///
/// # Errors
/// [`CompileError::Option`] for an exception that names no projection of the graph.
pub fn apply_precision(graph: &Graph, policy: &PrecisionPolicy<'_>) -> Result<Graph, CompileError> {
    let mut out = Graph { nodes: Vec::with_capacity(graph.nodes.len()), ..graph.clone() };
    let mut casts: HashMap<(ValueId, ActivationType), ValueId> = HashMap::new();
    let mut unused: Vec<&String> = policy.overrides.keys().collect();
    for node in &graph.nodes {
        let mut node = node.clone();
        if let Op::Linear(part) = &node.op {
            let path = projection(graph, &node, part);
            let matching = |key: &&String| matches(&path, key);
            unused.retain(|key| !matching(key));
            // The longest matching name is the most specific.
            let rule = policy.overrides.keys().filter(matching).max_by_key(|key| key.len());
            let precision = rule.map_or(policy.default, |key| policy.overrides[key]);
            let dtype = graph.weight(part.weight).dtype;
            let integers = dtype.is_quantized() && policy.int8_activations;
            let halves = dtype == DType::BF16 && policy.bf16_activations;
            let to = match precision {
                Precision::BF16 => ActivationType::BF16,
                Precision::F16 => ActivationType::F16,
                Precision::Mix if integers => ActivationType::Int8,
                Precision::Mix if halves => ActivationType::BF16,
                Precision::Mix | Precision::F32 => ActivationType::F32,
            };
            if to != ActivationType::F32 {
                let x = node.inputs[0];
                node.inputs[0] = *casts.entry((x, to)).or_insert_with(|| cast(&mut out, x, to, node.layer));
            }
        }
        out.nodes.push(node);
    }
    if let Some(key) = unused.first() {
        let expected = "the name of a projection of the model (as q_proj, layers.0.mlp.down_proj or lm_head); norms, \
                        softmax and logits are f32 always";
        return Err(CompileError::Option { option: "precision_overrides", value: (*key).clone(), expected });
    }
    Ok(out)
}

fn cast(out: &mut Graph, x: ValueId, to: ActivationType, layer: Option<u32>) -> ValueId {
    let source = out.value(x);
    let value =
        Value { name: format!("{}.{}", source.name, to.name()), rows: source.rows, cols: source.cols, elem: to.elem() };
    let id = ValueId(to_u32(out.values.len()));
    out.values.push(value);
    out.nodes.push(Node { op: Op::Cast(to), inputs: vec![x], outputs: vec![id], layer });
    id
}

/// Path of the projection in the model. The output projection is `lm_head`, even if its weight is the embedding.
fn projection(graph: &Graph, node: &Node, part: &LinearPart) -> String {
    if node.layer.is_none() {
        return "lm_head".to_owned();
    }
    let name = &graph.weight(part.weight).name;
    name.strip_suffix(".weight").unwrap_or(name).to_owned()
}

/// Whether a path ends with the name, at a segment boundary.
fn matches(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|before| !name.is_empty() && (before.is_empty() || before.ends_with('.')))
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn names_match_whole_segments_at_the_end() {
        assert!(matches("model.layers.3.mlp.down_proj", "down_proj"));
        assert!(matches("model.layers.3.mlp.down_proj", "layers.3.mlp.down_proj"));
        assert!(matches("lm_head", "lm_head"));
        for wrong in ["proj", "mlp", "", "3.mlp", "layers.13.mlp.down_proj"] {
            assert!(!matches("model.layers.3.mlp.down_proj", wrong), "{wrong}");
        }
    }
}

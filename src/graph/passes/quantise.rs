//! Chooses int8 activations for integer weights.

use std::collections::HashMap;

use crate::graph::{Elem, Graph, Node, Op, Value, ValueId, id32};

/// Puts one `quantise` in front of the linear operations whose weights are stored as integers, shared by all that read
/// the same value. Linear operations over float weights keep f32 activations.
pub fn select_quantised(graph: &Graph) -> Graph {
    let mut out = Graph { nodes: Vec::with_capacity(graph.nodes.len()), ..graph.clone() };
    let mut quantised: HashMap<ValueId, ValueId> = HashMap::new();
    for node in &graph.nodes {
        let mut node = node.clone();
        if let Op::Linear(part) = &node.op
            && graph.weight(part.weight).dtype.is_quantised()
        {
            let x = node.inputs[0];
            let q = *quantised.entry(x).or_insert_with(|| {
                let source = graph.value(x);
                let id = ValueId(id32(out.values.len()));
                out.values.push(Value {
                    name: format!("{}.q8", source.name),
                    rows: source.rows,
                    cols: source.cols,
                    elem: Elem::Q8,
                });
                out.nodes.push(Node { op: Op::Quantise, inputs: vec![x], outputs: vec![id], layer: node.layer });
                id
            });
            node.inputs[0] = q;
        }
        out.nodes.push(node);
    }
    out
}

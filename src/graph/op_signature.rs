//! Operand signatures of operations: number, shapes, types, and weights.
//!
//! Each plan is checked against them, so devices may index operands, weights and rows without further checks. The rules
//! cover shapes only; `verify` checks the order of writes and reads, and the placement of values.

use super::{Elem, LinearPart, NormSpec, Op, RopeFrequencies, RowDim, Weight, WeightId, WeightRole};

/// Shape of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operand {
    pub rows: RowDim,
    pub cols: usize,
    pub elem: Elem,
}

/// The operands of one operation, with the tables that their ids index.
#[derive(Debug)]
pub(super) struct Operands<'a> {
    pub inputs: Vec<Operand>,
    pub outputs: Vec<Operand>,
    pub scratch: Option<Operand>,
    pub weights: &'a [Weight],
    pub ropes: &'a [RopeFrequencies],
    pub vocab_size: usize,
}

type Checked = Result<(), String>;

fn must(holds: bool, what: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(what()) }
}

fn same(what: &str, got: Operand, expected: Operand) -> Checked {
    must(got == expected, || format!("{what} is {got:?}, expected {expected:?}"))
}

impl Operand {
    const fn with(self, elem: Elem) -> Self {
        Self { elem, ..self }
    }

    fn is_f32(self, what: &str) -> Checked {
        must(self.elem == Elem::F32, || format!("{what} is {:?}, expected f32", self.elem))
    }

    fn is_effect(self, what: &str) -> Checked {
        same(what, self, Self { rows: RowDim::Tokens, cols: 0, elem: Elem::Effect })
    }
}

impl Operands<'_> {
    /// Checks the operands of `op`; returns the first error.
    pub(super) fn check(&self, op: &Op) -> Checked {
        let scratch = matches!(op, Op::SwigluLinear { .. });
        must(self.scratch.is_some() == scratch, || "a fused MLP needs scratch, and no other operation has it".into())?;
        match op {
            Op::Embed { table, .. } => {
                let [] = self.inputs()?;
                let [out] = self.outputs()?;
                let role = self.weight(*table)?.role;
                must(role == WeightRole::Table, || format!("rows are gathered from a {role:?}"))?;
                let (_, width) = self.matrix(*table)?;
                same("the output", out, Operand { rows: RowDim::Tokens, cols: width, elem: Elem::F32 })
            }
            Op::RopeAngles { rope } => {
                let [] = self.inputs()?;
                let [out] = self.outputs()?;
                let table = self.ropes.get(*rope).ok_or_else(|| format!("there is no rotary table {rope}"))?;
                let cols = 2 * table.inv_freq.len();
                same("the output", out, Operand { rows: RowDim::Tokens, cols, elem: Elem::F32 })
            }
            Op::RmsNorm(norm) => self.norm_of(norm, Elem::F32),
            Op::NormCast { norm, to } => self.norm_of(norm, to.elem()),
            Op::Activation(_) | Op::AllReduce => self.map(Elem::F32),
            Op::Scale(factor) => {
                must(factor.is_finite(), || format!("a factor of {factor}, expected a finite one"))?;
                self.map(Elem::F32)
            }
            Op::Cast(to) => self.map(to.elem()),
            Op::Custom(_) => {
                let [x] = self.inputs()?;
                rows_of_tokens("the input", x)?;
                self.map(Elem::F32)
            }
            Op::AllGather => {
                let [x] = self.inputs()?;
                let [out] = self.outputs()?;
                x.is_f32("the input")?;
                must(out.cols >= x.cols, || format!("{} columns gathered into {}", x.cols, out.cols))?;
                same("the output", out, Operand { cols: out.cols, ..x })
            }
            Op::Add | Op::Mul | Op::ActMul(_) => {
                let [a, b] = self.inputs()?;
                let [out] = self.outputs()?;
                a.is_f32("the first input")?;
                same("the second input", b, a)?;
                same("the output", out, a)
            }
            Op::Linear(part) => {
                let [x] = self.inputs()?;
                let [out] = self.outputs()?;
                self.linear(part, x, out)
            }
            Op::LinearMulti(parts) => {
                let [x] = self.inputs()?;
                must(!parts.is_empty() && parts.len() == self.outputs.len(), || {
                    format!("{} outputs of {} projections", self.outputs.len(), parts.len())
                })?;
                parts.iter().zip(&self.outputs).try_for_each(|(part, out)| self.linear(part, x, *out))
            }
            Op::SwigluLinear { part, to, .. } => {
                let [gate, up] = self.inputs()?;
                let [out] = self.outputs()?;
                gate.is_f32("the gate")?;
                same("the second input", up, gate)?;
                let product = gate.with(to.elem());
                self.scratch.map_or(Ok(()), |scratch| same("the scratch", scratch, product))?;
                self.linear(part, product, out)
            }
            Op::AddRmsNorm { norm, to } => {
                let [x, d] = self.inputs()?;
                let [sum, normed] = self.outputs()?;
                x.is_f32("the first input")?;
                same("the second input", d, x)?;
                same("the sum", sum, x)?;
                same("the norm", normed, x.with(to.elem()))?;
                self.norm(norm, x)
            }
            Op::Rope { head_dim, .. } => {
                let [x, angles] = self.inputs()?;
                let [out] = self.outputs()?;
                rotation(x, angles, *head_dim)?;
                same("the output", out, x)
            }
            Op::QkNormRope { norm, head_dim, .. } => {
                let [x, angles] = self.inputs()?;
                let [out] = self.outputs()?;
                rotation(x, angles, *head_dim)?;
                self.head_norm(norm, *head_dim, x)?;
                same("the output", out, x)
            }
            Op::KvWrite { .. } => {
                let [k, v] = self.inputs()?;
                let [stored] = self.outputs()?;
                rows_of_tokens("the keys", k)?;
                same("the values", v, k)?;
                stored.is_effect("the output")
            }
            Op::RopeKvWrite { head_dim, norm, .. } => {
                let [k, angles, v] = self.inputs()?;
                let [stored] = self.outputs()?;
                rows_of_tokens("the keys", k)?;
                rotation(k, angles, *head_dim)?;
                norm.as_ref().map_or(Ok(()), |norm| self.head_norm(norm, *head_dim, k))?;
                same("the values", v, k)?;
                stored.is_effect("the output")
            }
            Op::Attention(shape) => {
                let [q, stored] = self.inputs()?;
                let [out] = self.outputs()?;
                stored.is_effect("the second input")?;
                rows_of_tokens("the queries", q)?;
                must(shape.kv_heads > 0 && shape.heads > 0 && shape.heads.is_multiple_of(shape.kv_heads), || {
                    format!("{} heads over {} KV heads", shape.heads, shape.kv_heads)
                })?;
                must(shape.head_dim > 0 && shape.heads.checked_mul(shape.head_dim) == Some(q.cols), || {
                    format!("queries of {} columns, expected {} heads of {}", q.cols, shape.heads, shape.head_dim)
                })?;
                must(shape.window != Some(0), || "a window of 0 keys, expected at least 1".into())?;
                same("the output", out, q)
            }
            Op::GatherRows => {
                let [x] = self.inputs()?;
                let [out] = self.outputs()?;
                rows_of_tokens("the input", x)?;
                same("the output", out, Operand { rows: RowDim::LogitRows, ..x })
            }
            Op::ArgMax => {
                let [logits] = self.inputs()?;
                let [best] = self.outputs()?;
                self.is_logits(logits)?;
                is_best(best)
            }
            Op::LinearArgMax(part) => {
                let [x] = self.inputs()?;
                let [logits, best] = self.outputs()?;
                self.linear(part, x, logits)?;
                self.is_logits(logits)?;
                is_best(best)
            }
            Op::RowStatus => {
                let [last, best] = self.inputs()?;
                let [] = self.outputs()?;
                rows_of_tokens("the last hidden state", last)?;
                is_best(best)
            }
        }
    }

    fn is_logits(&self, logits: Operand) -> Checked {
        same("the logits", logits, Operand { rows: RowDim::LogitRows, cols: self.vocab_size, elem: Elem::F32 })
    }

    fn inputs<const N: usize>(&self) -> Result<[Operand; N], String> {
        let got = self.inputs.len();
        self.inputs.as_slice().try_into().map_err(|_| format!("{got} inputs, expected {N}"))
    }

    fn outputs<const N: usize>(&self) -> Result<[Operand; N], String> {
        let got = self.outputs.len();
        self.outputs.as_slice().try_into().map_err(|_| format!("{got} outputs, expected {N}"))
    }

    fn weight(&self, id: WeightId) -> Result<&Weight, String> {
        self.weights.get(id.0 as usize).ok_or_else(|| format!("there is no weight {}", id.0))
    }

    fn matrix(&self, id: WeightId) -> Result<(usize, usize), String> {
        let weight = self.weight(id)?;
        match *weight.shape.as_slice() {
            [n, k] if n > 0 && k > 0 && weight.role.is_matrix() => Ok((n, k)),
            _ => Err(format!(
                "weight {} is a {:?} of shape {:?}, expected a matrix",
                weight.name, weight.role, weight.shape
            )),
        }
    }

    fn vector(&self, id: WeightId, len: usize) -> Checked {
        let weight = self.weight(id)?;
        must(weight.role == WeightRole::Vector && weight.shape == [len], || {
            format!(
                "weight {} is a {:?} of shape {:?}, expected a vector of {len}",
                weight.name, weight.role, weight.shape
            )
        })
    }

    fn linear(&self, part: &LinearPart, x: Operand, out: Operand) -> Checked {
        let (n, k) = self.matrix(part.weight)?;
        must(x.cols == k, || format!("rows of {} columns for a weight of {k}", x.cols))?;
        let quantized = self.weight(part.weight)?.dtype.is_quantized();
        must(matches!(x.elem, Elem::F32 | Elem::BF16) || (x.elem == Elem::Q8 && quantized), || {
            format!("rows of {:?} for a weight that is not quantized", x.elem)
        })?;
        part.bias.map_or(Ok(()), |bias| self.vector(bias, n))?;
        same("the output", out, Operand { rows: x.rows, cols: n, elem: Elem::F32 })
    }

    fn norm(&self, norm: &NormSpec, x: Operand) -> Checked {
        must(norm.group > 0 && x.cols.is_multiple_of(norm.group), || {
            format!("groups of {} in rows of {}", norm.group, x.cols)
        })?;
        self.vector(norm.weight, norm.group)
    }

    fn head_norm(&self, norm: &NormSpec, head_dim: usize, x: Operand) -> Checked {
        must(norm.group == head_dim, || format!("a head norm over {} of {head_dim} elements", norm.group))?;
        self.norm(norm, x)
    }

    fn norm_of(&self, norm: &NormSpec, elem: Elem) -> Checked {
        self.map(elem)?;
        let [x] = self.inputs()?;
        self.norm(norm, x)
    }

    fn map(&self, elem: Elem) -> Checked {
        let [x] = self.inputs()?;
        let [out] = self.outputs()?;
        x.is_f32("the input")?;
        same("the output", out, x.with(elem))
    }
}

fn is_best(best: Operand) -> Checked {
    same("the argmax ids", best, Operand { rows: RowDim::LogitRows, cols: 1, elem: Elem::U32 })
}

fn rows_of_tokens(what: &str, x: Operand) -> Checked {
    x.is_f32(what)?;
    must(x.rows == RowDim::Tokens, || format!("{what} have one row per {:?}, expected one per token", x.rows))
}

fn rotation(x: Operand, angles: Operand, head_dim: usize) -> Checked {
    x.is_f32("the input")?;
    angles.is_f32("the angles")?;
    must(angles.rows == x.rows, || "the angles and the input have different rows".into())?;
    must(head_dim > 0 && x.cols.is_multiple_of(head_dim), || format!("heads of {head_dim} in rows of {}", x.cols))?;
    must(angles.cols.is_multiple_of(2) && (2..=head_dim).contains(&angles.cols), || {
        format!("{} cosines and sines for heads of {head_dim}", angles.cols)
    })
}

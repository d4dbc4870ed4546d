//! Cost of a plan with all batch-independent parts summed, so that the engine can compute the cost of each step
//! cheaply.
//!
//! The cost of a step grows linearly with the rows of a batch and the keys they see, with two exceptions: a step
//! without rows does not run and reads no weights, and an embedding reads at most the rows of its table. The cost of a
//! plan is therefore a few sums of coefficients and these two exceptions.

use super::cost::window_of;
use crate::graph::{Cost, CostShape, Op, Plan, RowDim, Step, attended_tokens, shown_tokens};

/// Cost of a plan as coefficients.
///
/// [`cost`](Self::cost) equals the sum of [`Plan::batch_costs`], without access to the plan and without allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CostRates {
    /// Steps whose cost depends on the rows of the batch.
    over_tokens: Linear,
    /// Steps whose cost depends on the rows of logits.
    over_logit_rows: Linear,
    /// Cost of keys and values, for each window of the layers.
    windows: Vec<WindowRates>,
    /// Embedding tables.
    tables: Vec<Table>,
}

/// `once + a_token · tokens + a_logit_row · logit rows`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Linear {
    once: Cost,
    a_token: Cost,
    a_logit_row: Cost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WindowRates {
    window: Option<u32>,
    /// Cost per key that a row sees.
    a_seen_key: Cost,
    /// Cost per distinct key that the rows of a sequence see.
    a_shown_key: Cost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Table {
    row_bytes: u64,
    rows: u64,
}

impl CostRates {
    /// Computes the rates of a plan whose stored keys and values have elements of this size.
    pub fn new(plan: &Plan, kv_element_bytes: u64) -> Self {
        let mut rates = Self::default();
        for step in &plan.steps {
            let at = |tokens: u64, logit_rows: u64, attended_tokens: u64, kv_tokens: u64| {
                let shape = CostShape { tokens, logit_rows, seqs: 1, attended_tokens, kv_tokens, kv_element_bytes };
                let mut cost = plan.step_cost(step, shape);
                if table_of(plan, step).is_some() {
                    cost.weight_bytes = 0;
                }
                cost
            };
            let one = at(1, 1, 0, 0);
            let (a_token, a_logit_row) = (less(at(2, 1, 0, 0), one), less(at(1, 2, 0, 0), one));
            let line = Linear { once: less(less(one, a_token), a_logit_row), a_token, a_logit_row };
            match plan.rows_of(step) {
                Some(RowDim::Tokens) => rates.over_tokens.add(line),
                Some(RowDim::LogitRows) => rates.over_logit_rows.add(line),
                None => {}
            }
            if let Op::Attention(_) = step.op {
                rates.add_window(window_of(step), less(at(1, 1, 1, 0), one), less(at(1, 1, 0, 1), one));
            }
            rates.tables.extend(table_of(plan, step));
        }
        rates
    }

    /// Cost of a batch whose sequences have `q_lens` rows, and `kv_lens` tokens after the step.
    pub fn cost(&self, q_lens: &[u32], kv_lens: &[u32], logit_rows: u64) -> Cost {
        let tokens: u64 = q_lens.iter().map(|&q| u64::from(q)).sum();
        let mut cost = Cost::default();
        if tokens > 0 {
            cost += self.over_tokens.at(tokens, logit_rows);
            for rates in &self.windows {
                cost += times(rates.a_seen_key, attended_tokens(q_lens, kv_lens, rates.window));
                cost += times(rates.a_shown_key, shown_tokens(q_lens, kv_lens, rates.window));
            }
            for table in &self.tables {
                let weight_bytes = table.row_bytes.saturating_mul(tokens.min(table.rows));
                cost += Cost { weight_bytes, ..Cost::default() };
            }
        }
        if logit_rows > 0 {
            cost += self.over_logit_rows.at(tokens, logit_rows);
        }
        cost
    }

    fn add_window(&mut self, window: Option<u32>, a_seen_key: Cost, a_shown_key: Cost) {
        if let Some(rates) = self.windows.iter_mut().find(|rates| rates.window == window) {
            rates.a_seen_key += a_seen_key;
            rates.a_shown_key += a_shown_key;
        } else {
            self.windows.push(WindowRates { window, a_seen_key, a_shown_key });
        }
    }
}

impl Linear {
    fn add(&mut self, other: Self) {
        self.once += other.once;
        self.a_token += other.a_token;
        self.a_logit_row += other.a_logit_row;
    }

    fn at(&self, tokens: u64, logit_rows: u64) -> Cost {
        self.once + times(self.a_token, tokens) + times(self.a_logit_row, logit_rows)
    }
}

/// Table of an embedding step, whose cost is the only one with an upper bound.
fn table_of(plan: &Plan, step: &Step) -> Option<Table> {
    let Op::Embed { table, .. } = step.op else { return None };
    let shape = CostShape { tokens: 1, ..CostShape::default() };
    let rows = plan.weights[table.0 as usize].shape.iter().rev().skip(1).map(|&dim| dim as u64);
    Some(Table { row_bytes: plan.step_cost(step, shape).weight_bytes, rows: rows.fold(1, u64::saturating_mul) })
}

fn less(all: Cost, part: Cost) -> Cost {
    Cost {
        flops: all.flops.saturating_sub(part.flops),
        int8_flops: all.int8_flops.saturating_sub(part.int8_flops),
        weight_bytes: all.weight_bytes.saturating_sub(part.weight_bytes),
        activation_bytes: all.activation_bytes.saturating_sub(part.activation_bytes),
        kv_bytes: all.kv_bytes.saturating_sub(part.kv_bytes),
    }
}

fn times(cost: Cost, n: u64) -> Cost {
    Cost {
        flops: cost.flops.saturating_mul(n),
        int8_flops: cost.int8_flops.saturating_mul(n),
        weight_bytes: cost.weight_bytes.saturating_mul(n),
        activation_bytes: cost.activation_bytes.saturating_mul(n),
        kv_bytes: cost.kv_bytes.saturating_mul(n),
    }
}

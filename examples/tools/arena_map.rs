//! Picture of a plan's arena over its steps, as SVG.

use std::cmp::Reverse;
use std::path::Path;

use ascend_llm::graph::{Operand, Plan};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::mib;
use crate::terminal::Result;

const FONT: &str = "sans-serif";
const GRAY: RGBColor = RGBColor(0x55, 0x55, 0x55);
const BAND: RGBColor = RGBColor(0xf0, 0xf0, 0xf0);
const HEIGHT: u32 = 800;
const HEAD: u32 = 70;
const LEGEND_WIDTH: u32 = 250;
/// Distance between two lines of the legend, in pixels.
const LEGEND_LINE: i32 = 38;
/// Number of kinds of values with a color and an entry in the legend.
const NAMED_KINDS: usize = 12;

/// A value in the arena.
#[derive(Clone, Debug)]
struct Value<'a> {
    name: &'a str,
    offset: usize,
    bytes: usize,
    /// First step that uses the value.
    first: usize,
    /// Last step that uses it.
    last: usize,
}

impl Value<'_> {
    /// The name without the layer: `gate` for `gate.7`.
    fn kind(&self) -> String {
        let is_layer = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit());
        self.name.split('.').filter(|part| !is_layer(part)).collect::<Vec<_>>().join(".")
    }
}

/// Draws a column for each step and a rectangle for each value, from its first to its last use.
///
/// The largest kinds of values have a color and an entry in the legend. A value's name is in its rectangle if it fits.
///
/// # Errors
/// A file that cannot be written.
pub fn draw(path: &Path, model: &str, plan: &Plan) -> Result<()> {
    let values = arena_values(plan);
    let mut kinds: Vec<(String, usize, usize)> = Vec::new();
    for value in &values {
        match kinds.iter_mut().find(|(kind, ..)| *kind == value.kind()) {
            Some((_, bytes, count)) => (*bytes, *count) = ((*bytes).max(value.bytes), *count + 1),
            None => kinds.push((value.kind(), value.bytes, 1)),
        }
    }
    kinds.sort_by_key(|(_, bytes, count)| Reverse((*bytes, *count)));
    let color = |rank: usize| match rank {
        // Neighbors in the legend are far apart on the color wheel.
        0..NAMED_KINDS => HSLColor(rank as f64 * 5.0 / NAMED_KINDS as f64 % 1.0, 0.55, 0.66).to_rgba(),
        _ => RGBColor(0xcc, 0xcc, 0xcc).to_rgba(),
    };

    let steps = u32::try_from(plan.steps.len())?.max(1);
    let step_width = (1000 / steps).clamp(4, 26);
    let size = (LEGEND_WIDTH + (90 + steps * step_width).max(760), HEIGHT);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(HEAD);
    let title = format!(
        "Arena of {model} for {} rows: {:.2} MiB in total, {} steps",
        plan.bucket.tokens,
        mib(plan.arena_bytes as u64),
        plan.steps.len()
    );
    head.draw_text(&title, &(FONT, 22).into_text_style(&head), (16, 12))?;
    let subtitle = format!(
        "{} values, {:.2} MiB without reuse of memory; the live values of a step need at most {:.2} MiB",
        values.len(),
        mib(values.iter().map(|value| value.bytes as u64).sum()),
        mib(plan.arena_bound_bytes as u64)
    );
    head.draw_text(&subtitle, &(FONT, 16).into_text_style(&head).color(&GRAY), (16, 42))?;

    let (body, legend) = body.split_horizontally(size.0 - LEGEND_WIDTH);
    let top = mib(plan.arena_bytes.max(1) as u64);
    let mut chart = ChartBuilder::on(&body)
        .margin(10)
        .x_label_area_size(48)
        .y_label_area_size(66)
        .build_cartesian_2d(0.0..f64::from(steps), 0.0..top)?;
    let bands = plan.steps.iter().enumerate().filter(|(_, step)| step.layer.is_some_and(|layer| layer % 2 == 1));
    chart
        .draw_series(bands.map(|(at, _)| Rectangle::new([(at as f64, 0.0), (at as f64 + 1.0, top)], BAND.filled())))?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("step of the plan")
        .y_desc("offset in the arena, MiB")
        .x_labels(16)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.1}"))
        .label_style((FONT, 15))
        .axis_desc_style((FONT, 17))
        .draw()?;
    for value in &values {
        let rank = kinds.iter().position(|(kind, ..)| *kind == value.kind()).unwrap_or(NAMED_KINDS);
        let (low, high) = (mib(value.offset as u64), mib((value.offset + value.bytes) as u64));
        let corners = [(value.first as f64, low), (value.last as f64 + 1.0, high)];
        chart.draw_series([Rectangle::new(corners, color(rank).filled()), Rectangle::new(corners, BLACK.mix(0.5))])?;
        let [(left, bottom), (right, upper)] = corners.map(|corner| chart.backend_coord(&corner));
        if right - left >= 8 * i32::try_from(value.name.len())? && bottom - upper >= 16 {
            let style = (FONT, 13).into_text_style(&root).pos(Pos::new(HPos::Center, VPos::Center));
            root.draw_text(value.name, &style, (i32::midpoint(left, right), i32::midpoint(bottom, upper)))?;
        }
    }

    legend.draw_text("Largest values", &(FONT, 17).into_text_style(&legend), (8, 10))?;
    let mut y = 42;
    for (rank, (kind, bytes, count)) in kinds.iter().take(NAMED_KINDS).enumerate() {
        let times = if *count > 1 { format!(", {count} times") } else { String::new() };
        let detail = format!("{:.3} MiB{times}", mib(*bytes as u64));
        legend_entry(&legend, y, color(rank), kind, &detail)?;
        y += LEGEND_LINE;
    }
    if let Some(largest) = kinds.get(NAMED_KINDS) {
        let detail = format!("at most {:.3} MiB each", mib(largest.1 as u64));
        legend_entry(&legend, y, color(NAMED_KINDS), &format!("{} other kinds", kinds.len() - NAMED_KINDS), &detail)?;
        y += LEGEND_LINE;
    }
    legend_entry(&legend, y, BAND.to_rgba(), "background", "every other layer")?;
    root.present()?;
    Ok(())
}

fn legend_entry(
    legend: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    y: i32,
    color: RGBAColor,
    name: &str,
    detail: &str,
) -> Result<()> {
    legend.draw(&Rectangle::new([(8, y), (24, y + 16)], color.filled()))?;
    legend.draw_text(name, &(FONT, 15).into_text_style(legend), (32, y - 2))?;
    legend.draw_text(detail, &(FONT, 13).into_text_style(legend).color(&GRAY), (32, y + 15))?;
    Ok(())
}

/// The values in the arena that a step uses.
fn arena_values(plan: &Plan) -> Vec<Value<'_>> {
    let mut uses: Vec<Option<(usize, usize)>> = vec![None; plan.values.len()];
    for (at, step) in plan.steps.iter().enumerate() {
        for &value in step.inputs.iter().chain(&step.outputs).chain(&step.scratch) {
            uses[value] = Some((uses[value].map_or(at, |(first, _)| first), at));
        }
    }
    let placed = plan.values.iter().zip(uses).filter_map(|(value, uses)| {
        let (Operand::Arena { offset }, Some((first, last))) = (value.operand, uses) else { return None };
        Some(Value { name: &value.name, offset, bytes: value.bytes(&plan.bucket), first, last })
    });
    placed.collect()
}

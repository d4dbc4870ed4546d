//! Map of a plan's arena over its steps, as an SVG file.

use std::path::Path;

use ascend_llm::graph::{Operand, Plan};
use plotters::prelude::*;

use crate::terminal::Result;

const FONT: &str = "sans-serif";
const GRAY: RGBColor = RGBColor(0x55, 0x55, 0x55);
/// Values of the arena with a name in the legend.
const NAMED_VALUES: usize = 14;
/// Height of a line of the legend, in pixels.
const LEGEND_LINE: i32 = 34;

/// Draws a plan's arena: a column for each step, a rectangle for each value from its first use to its last.
///
/// # Errors
/// A file that cannot be written.
pub fn draw(path: &Path, model: &str, plan: &Plan) -> Result<()> {
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let mut values = Vec::new();
    for (index, value) in plan.values.iter().enumerate() {
        let Operand::Arena { offset } = value.operand else { continue };
        let touches = |at: &usize| {
            let step = &plan.steps[*at];
            step.inputs.iter().chain(&step.outputs).chain(&step.scratch).any(|&touched| touched == index)
        };
        let mut uses = (0..plan.steps.len()).filter(touches);
        let Some(first) = uses.next() else { continue };
        let last = uses.next_back().unwrap_or(first);
        values.push((value.bytes(&plan.bucket), offset, first, last, value.name.as_str()));
    }
    values.sort_by_key(|value| std::cmp::Reverse(value.0));

    let root = SVGBackend::new(path, (1280, 860)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(64);
    let title = format!("Arena of {model}: {:.2} MiB in total", mib(plan.arena_bytes));
    head.draw_text(&title, &(FONT, 20).into_text_style(&head), (16, 10))?;
    let subtitle = format!(
        "{} values of {:.2} MiB share it over {} steps; at least {:.2} MiB are alive at once",
        values.len(),
        mib(values.iter().map(|value| value.0).sum()),
        plan.steps.len(),
        mib(plan.arena_bound_bytes)
    );
    head.draw_text(&subtitle, &(FONT, 13).into_text_style(&head).color(&GRAY), (16, 40))?;
    let (body, legend) = body.split_horizontally(930);
    let steps = plan.steps.len().max(1) as f64;
    let mut chart = ChartBuilder::on(&body)
        .margin(10)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..steps, 0.0..mib(plan.arena_bytes).max(f64::MIN_POSITIVE))?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("step of the plan")
        .y_desc("offset in the arena, MiB")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 14))
        .draw()?;
    let color = |rank: usize| {
        if rank < NAMED_VALUES {
            HSLColor(rank as f64 / NAMED_VALUES as f64, 0.6, 0.62).to_rgba()
        } else {
            RGBColor(0xc8, 0xc8, 0xc8).to_rgba()
        }
    };
    // The small values last, so that none is hidden.
    for (rank, &(bytes, offset, first, last, _)) in values.iter().enumerate() {
        let corners = [(first as f64, mib(offset)), ((last + 1) as f64, mib(offset + bytes))];
        chart.draw_series([Rectangle::new(corners, color(rank).filled()), Rectangle::new(corners, BLACK.mix(0.5))])?;
    }
    legend.draw_text("Largest values", &(FONT, 14).into_text_style(&legend), (8, 12))?;
    let mut y = 40;
    for (rank, (bytes, _, first, last, name)) in values.iter().take(NAMED_VALUES).enumerate() {
        legend.draw(&Rectangle::new([(8, y), (22, y + 14)], color(rank).filled()))?;
        legend.draw_text(name, &(FONT, 12).into_text_style(&legend), (30, y - 1))?;
        let detail = format!("{:.3} MiB, steps {first} to {last}", mib(*bytes));
        legend.draw_text(&detail, &(FONT, 11).into_text_style(&legend).color(&GRAY), (30, y + 14))?;
        y += LEGEND_LINE;
    }
    if values.len() > NAMED_VALUES {
        legend.draw(&Rectangle::new([(8, y), (22, y + 14)], color(NAMED_VALUES).filled()))?;
        let rest = format!("{} smaller values", values.len() - NAMED_VALUES);
        legend.draw_text(&rest, &(FONT, 12).into_text_style(&legend), (30, y - 1))?;
    }
    root.present()?;
    Ok(())
}

//! Chart of throughput over batch size, as an SVG file.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::terminal::Result;

const COLORS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x5f, 0xa8),
    RGBColor(0xb0, 0x41, 0x3e),
    RGBColor(0x2f, 0x7d, 0x4f),
    RGBColor(0x7a, 0x4f, 0xa3),
    RGBColor(0xb8, 0x86, 0x0b),
    RGBColor(0x44, 0x44, 0x44),
];
const FONT: &str = "sans-serif";
/// Distance between two labels, in pixels.
const LABEL_GAP: i32 = 17;

/// A line with its name.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    /// Number of sequences, and tokens per second.
    pub points: Vec<(u32, f64)>,
}

/// Draws throughput over the number of sequences, which is on a doubling scale. Lines without points are left out.
///
/// # Errors
/// A file that cannot be written.
pub fn draw(path: &Path, title: &str, subtitle: &str, lines: &[Line]) -> Result<()> {
    let lines: Vec<&Line> = lines.iter().filter(|line| !line.points.is_empty()).collect();
    let points = || lines.iter().flat_map(|line| &line.points);
    let most = points().map(|point| point.0).max().unwrap_or(2).max(2);
    let top = points().map(|point| point.1).fold(1.0, f64::max) * 1.08;
    let root = SVGBackend::new(path, (820, 460)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(56);
    head.draw_text(title, &(FONT, 17).into_text_style(&head), (16, 8))?;
    head.draw_text(subtitle, &(FONT, 12).into_text_style(&head).color(&RGBColor(0x55, 0x55, 0x55)), (16, 34))?;
    let mut chart = ChartBuilder::on(&body)
        .margin_left(10)
        .margin_right(190)
        .margin_bottom(6)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..f64::from(most).log2(), 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_desc("sequences that decode together")
        .y_desc("tokens per second, all sequences")
        .x_labels(most.ilog2() as usize + 1)
        .x_label_formatter(&|x| format!("{:.0}", x.exp2()))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 13))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let mut labels = Vec::new();
    for (line, color) in lines.iter().zip(COLORS.iter().cycle()) {
        let at = |&(sequences, rate): &(u32, f64)| (f64::from(sequences).log2(), rate);
        chart.draw_series(LineSeries::new(line.points.iter().map(at), color.stroke_width(2)))?;
        chart.draw_series(line.points.iter().map(|point| Circle::new(at(point), 3, color.filled())))?;
        if let Some(last) = line.points.last() {
            let (x, y) = chart.backend_coord(&at(last));
            labels.push((x + 10, y, format!("{} {:.0}", line.name, last.1), *color));
        }
    }
    // Labels in the order of their heights, moved up where two would overlap.
    labels.sort_by_key(|label| std::cmp::Reverse(label.1));
    let mut lowest = i32::MAX;
    for (x, y, text, color) in labels {
        let y = y.min(lowest - LABEL_GAP);
        lowest = y;
        let style = (FONT, 13).into_text_style(&root).color(&color).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw_text(&text, &style, (x, y))?;
    }
    root.present()?;
    Ok(())
}

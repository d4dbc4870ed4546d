//! Line chart of throughput over the number of sequences, as SVG.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::terminal::Result;

const SIZE: (u32, u32) = (860, 480);
const FONT: &str = "sans-serif";
const GRAY: RGBColor = RGBColor(0x55, 0x55, 0x55);
const COLORS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x5f, 0xa8),
    RGBColor(0xb0, 0x41, 0x3e),
    RGBColor(0x2f, 0x7d, 0x4f),
    RGBColor(0x7a, 0x4f, 0xa3),
    RGBColor(0xb8, 0x86, 0x0b),
    RGBColor(0x44, 0x44, 0x44),
];
/// Smallest distance between two labels, in pixels.
const LABEL_GAP: i32 = 18;

/// A line with its name.
#[derive(Clone, Debug)]
pub struct Line {
    /// Label of the line.
    pub name: String,
    /// Number of sequences, and tokens per second of all of them.
    pub points: Vec<(u32, f64)>,
}

/// Draws the lines that have points. The number of sequences is on a log scale.
///
/// # Errors
/// A file that cannot be written.
pub fn draw(path: &Path, title: &str, subtitle: &str, lines: &[Line]) -> Result<()> {
    let lines: Vec<&Line> = lines.iter().filter(|line| !line.points.is_empty()).collect();
    let points = || lines.iter().flat_map(|line| &line.points);
    let most = points().map(|point| point.0).max().unwrap_or(2).max(2);
    let top = round_up(points().map(|point| point.1).fold(1.0, f64::max));

    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    root.draw_text(title, &(FONT, 21).into_text_style(&root), (16, 14))?;
    root.draw_text(subtitle, &(FONT, 15).into_text_style(&root).color(&GRAY), (16, 42))?;
    let mut chart = ChartBuilder::on(&root)
        .margin_top(74)
        .margin_left(10)
        .margin_bottom(8)
        .margin_right(130)
        .x_label_area_size(46)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..f64::from(most).log2(), 0.0..top)?;
    chart
        .configure_mesh()
        .x_desc("sequences in the batch")
        .y_desc("tokens per second, all sequences")
        .x_labels(most.ilog2() as usize + 1)
        .x_label_formatter(&|x| format!("{:.0}", x.exp2()))
        .y_labels(6)
        .y_label_formatter(&|y| format!("{y:.0}"))
        .label_style((FONT, 15))
        .axis_desc_style((FONT, 16))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .draw()?;
    let mut labels = Vec::new();
    for (line, color) in lines.iter().zip(COLORS.iter().cycle()) {
        let at = |&(sequences, rate): &(u32, f64)| (f64::from(sequences).log2(), rate);
        chart.draw_series(LineSeries::new(line.points.iter().map(at), color.stroke_width(2)))?;
        chart.draw_series(line.points.iter().map(|point| Circle::new(at(point), 3, color.filled())))?;
        if let Some(last) = line.points.last() {
            labels.push((chart.backend_coord(&at(last)), format!("{} {:.0}", line.name, last.1), color));
        }
    }
    labels.sort_by_key(|((_, y), ..)| *y);
    let positions: Vec<i32> = labels.iter().map(|((_, y), ..)| *y).collect();
    for (((x, _), text, color), y) in labels.iter().zip(spread(&positions, LABEL_GAP)) {
        let style = (FONT, 16).into_text_style(&root).color(*color).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw_text(text, &style, (x + 10, y))?;
    }
    root.present()?;
    Ok(())
}

/// Moves ascending positions apart until the distance between neighbors is at least `gap`.
///
/// Positions that are too close become a block of evenly spaced positions around their mean.
fn spread(positions: &[i32], gap: i32) -> Vec<i32> {
    // A block: the sum of the starts that its positions prefer, and their number. It starts at the mean of the preferences.
    let mut blocks: Vec<(i32, i32)> = Vec::new();
    let start = |(sum, count): (i32, i32)| sum.div_euclid(count);
    for &y in positions {
        let mut block = (y, 1);
        while let Some(&above) = blocks.last() {
            if start(above) + above.1 * gap <= start(block) {
                break;
            }
            block = (above.0 + block.0 - block.1 * above.1 * gap, above.1 + block.1);
            blocks.pop();
        }
        blocks.push(block);
    }
    blocks.iter().flat_map(|&block| (0..block.1).map(move |index| start(block) + index * gap)).collect()
}

/// The next of 1, 2, 2.5 and 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|n| n * power).find(|n| *n >= value).unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_that_are_apart_stay() {
        assert_eq!(spread(&[10, 40, 70], 18), [10, 40, 70]);
    }

    #[test]
    fn labels_that_are_too_close_move_apart_around_their_mean() {
        assert_eq!(spread(&[50, 50], 18), [41, 59]);
        assert_eq!(spread(&[50, 52, 54], 20), [32, 52, 72]);
        // The last two form a block that then touches the first label.
        assert_eq!(spread(&[10, 30, 30], 18), [5, 23, 41]);
    }

    #[test]
    fn the_axis_ends_at_a_round_number() {
        assert_eq!([1.0, 1.1, 2.2, 4.0, 99.0, 1559.0].map(round_up), [1.0, 2.0, 2.5, 5.0, 100.0, 2000.0]);
    }
}

//! A line chart as SVG: numbers of sequences on a doubling scale, rates on an even one from zero.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
/// Room for the labels: left, top, right, bottom.
const MARGIN: [f64; 4] = [70.0, 40.0, 150.0, 50.0];
const COLOURS: [&str; 6] = ["#1f5fa8", "#b0413e", "#2f7d4f", "#7a4fa3", "#b8860b", "#444444"];

/// A line with its name.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    /// What stands on the doubling scale, and the rate there.
    pub points: Vec<(u32, f64)>,
}

/// The chart; empty lines are left out.
pub fn chart(title: &str, x_label: &str, y_label: &str, lines: &[Line]) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let most_x = points().map(|point| point.0).max().unwrap_or(1).max(2);
    let top = round_up(points().map(|point| point.1).fold(1.0, f64::max));
    let [left, above, right, below] = MARGIN;
    let x = |n: u32| left + f64::from(n.max(1)).log2() / f64::from(most_x).log2() * (WIDTH - left - right);
    let y = |rate: f64| HEIGHT - below - rate / top * (HEIGHT - above - below);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{left}\" y=\"22\" font-size=\"15\">{title}</text>\n"
    );
    for step in 0..=5 {
        let rate = top * f64::from(step) / 5.0;
        let at = y(rate);
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{rate:.0}</text>",
            WIDTH - right,
            left - 8.0,
            at + 4.0
        );
    }
    for n in std::iter::successors(Some(1u32), |n| n.checked_mul(2)).take_while(|n| *n <= most_x) {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{n}</text>",
            x(n),
            HEIGHT - below + 18.0
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{x_label}</text>\n\
         <text x=\"16\" y=\"{:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {:.1})\">{y_label}</text>",
        f64::midpoint(left, WIDTH - right),
        HEIGHT - 10.0,
        HEIGHT / 2.0,
        HEIGHT / 2.0
    );
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()).filter(|(line, _)| !line.points.is_empty()) {
        let path: Vec<String> = line.points.iter().map(|(n, rate)| format!("{:.1},{:.1}", x(*n), y(*rate))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
        for (n, rate) in &line.points {
            let _ = writeln!(svg, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>", x(*n), y(*rate));
        }
        if let Some((n, rate)) = line.points.last() {
            let (at_x, at_y) = (x(*n) + 8.0, y(*rate) + 4.0);
            let _ =
                writeln!(svg, "<text x=\"{at_x:.1}\" y=\"{at_y:.1}\" fill=\"{colour}\">{} {rate:.0}</text>", line.name);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// The next of 1, 2, 2.5 and 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|n| n * power).find(|n| *n >= value).unwrap_or(10.0 * power)
}

//! A chart as SVG.

use super::chart::{Anchor, Chart, Colour, HEIGHT, Mark, WIDTH};
use std::fmt::Write;

/// The whole file.
pub fn render(chart: &Chart) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"DejaVu Sans, Arial, sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for mark in chart.drawing() {
        // Writing to a String cannot fail.
        let _ = writeln!(svg, "{}", element(&mark));
    }
    svg + "</svg>\n"
}

fn element(mark: &Mark) -> String {
    match mark {
        Mark::Stroke { points, colour, width, dashed } => {
            let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let dashes = if *dashed { " stroke-dasharray=\"8 5\"" } else { "" };
            let (points, colour) = (points.join(" "), hex(*colour));
            format!(
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"{dashes}/>"
            )
        }
        Mark::Disc { at: (x, y), radius, colour } => {
            format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{}\"/>", hex(*colour))
        }
        Mark::Text { at: (x, y), text, anchor, upright } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            let turn = if *upright { format!(" transform=\"rotate(-90 {x:.1} {y:.1})\"") } else { String::new() };
            let text = escaped(text);
            format!("<text x=\"{x:.1}\" y=\"{y:.1}\" dy=\"0.35em\" text-anchor=\"{anchor}\"{turn}>{text}</text>")
        }
    }
}

fn hex([red, green, blue]: Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

//! A chart as SVG, with a title and a description for screen readers, and colours for dark pages.

use super::chart::{Anchor, COLOURS, Chart, Colour, GRID, HEIGHT, INK, LIMIT, Mark, WIDTH};
use std::fmt::Write;

/// The colours on a dark page, in the order of [`COLOURS`].
const DARK_COLOURS: [Colour; 6] =
    [[86, 156, 214], [255, 140, 66], [60, 200, 150], [230, 150, 195], [240, 190, 60], [130, 205, 245]];
const DARK_PAGE: &str = "#0d1117";
const DARK_INK: Colour = [230, 230, 230];
const DARK_GRID: Colour = [48, 54, 61];
const DARK_LIMIT: Colour = [160, 160, 160];

/// The whole file.
pub fn render(chart: &Chart) -> String {
    let (title, description) = (escaped(&chart.titles.join("; ")), escaped(&description(chart)));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"DejaVu Sans, Arial, sans-serif\" font-size=\"13\">\n\
         <title>{title}</title>\n<desc>{description}</desc>\n{}\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        style()
    );
    for mark in chart.drawing() {
        // Writing to a String cannot fail.
        let _ = writeln!(svg, "{}", element(&mark));
    }
    svg + "</svg>\n"
}

/// What the chart shows, for those who cannot see it.
fn description(chart: &Chart) -> String {
    let names: Vec<&str> = chart.lines.iter().filter(|line| !line.points.is_empty()).map(|line| line.name()).collect();
    let (y, x, captions) = (&chart.y.label, &chart.x.label, chart.captions.join("; "));
    format!("{y} by {x}: {}. {captions}.", names.join(", "))
}

/// Colours for dark pages: a rule of a style sheet overrides the colour that an element names.
fn style() -> String {
    let mut rules = format!("rect{{fill:{DARK_PAGE}}}text{{fill:{}}}", hex(DARK_INK));
    let greys = [(INK, DARK_INK), (GRID, DARK_GRID), (LIMIT, DARK_LIMIT)];
    for (light, dark) in greys.into_iter().chain(COLOURS.into_iter().zip(DARK_COLOURS)) {
        let (light, dark) = (hex(light), hex(dark));
        // Writing to a String cannot fail.
        let _ = write!(rules, "[stroke=\"{light}\"]{{stroke:{dark}}}[fill=\"{light}\"]{{fill:{dark}}}");
    }
    format!("<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>\n")
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

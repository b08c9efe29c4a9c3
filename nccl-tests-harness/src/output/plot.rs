//! Charts that show a quantity for each message size, written as SVG. The crate plotters draws
//! them.
//!
//! A chart names the measured fabric, the host, the date, and the meaning of its points and bars,
//! because it may be shown without the page that explains it. Results of the software fabric are
//! not those of a DGX Spark.

use crate::date;
use crate::output::numbers::size;
use crate::ranks::placement;
use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::fs;
use std::ops::Range;
use std::path::Path;

/// Colours that colour-blind people can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];
const INK: RGBColor = RGBColor(30, 30, 30);
const GRID: RGBColor = RGBColor(225, 225, 225);

const SIZE: (u32, u32) = (960, 604);
const LEFT: i32 = 84;
const MARGIN: i32 = 84;
const LINE_HEIGHT: i32 = 20;
/// Maximum number of characters in a line of a caption.
const LINE_LETTERS: usize = 112;
/// Radius of a point in pixels. It is also half the width of an error bar.
const RADIUS: i32 = 4;

/// A chart. The x axis is logarithmic, the y axis linear from 0.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub title: String,
    pub fabric: String,
    pub points: &'static str,
    pub quantity: &'static str,
    pub lines: Vec<Line>,
}

#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub name: &'static str,
    pub points: Vec<Dot>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Dot {
    /// Message size (1 or more).
    pub bytes: u64,
    pub y: f64,
    /// Least and greatest y value, the ends of the error bar.
    pub spread: (f64, f64),
}

/// Makes the folder before the run, to find an unusable folder before anything is measured.
pub(crate) fn prepare(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("--plot {}", folder.display()))
}

/// Writes a chart as `folder`/`name`.svg, if it has points.
pub(crate) fn save(folder: &Path, name: &str, chart: &Chart) -> Result<()> {
    if chart.lines.iter().all(|line| line.points.is_empty()) {
        return Ok(());
    }
    let path = folder.join(format!("{name}.svg"));
    let svg = chart.render().with_context(|| format!("draw {name}.svg"))?;
    fs::write(&path, svg).with_context(|| format!("--plot {}", path.display()))
}

impl Chart {
    fn render(&self) -> Result<String> {
        let mut svg = String::new();
        let picture = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        picture.fill(&WHITE)?;
        self.draw_captions(&picture)?;
        self.draw(&picture)?;
        picture.present()?;
        drop(picture);
        Ok(svg)
    }

    fn draw_captions(&self, picture: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
        let place = format!(
            "{}; host {}; {}",
            self.fabric,
            placement::local_host_name(),
            date::today()
        );
        let first = SIZE.1 as i32 - MARGIN + LINE_HEIGHT;
        let captions = rows(&place).into_iter().chain(rows(self.points));
        for (row, y) in captions
            .take(3)
            .zip((first..).step_by(LINE_HEIGHT as usize))
        {
            let style = TextStyle::from(font().into_font())
                .color(&INK)
                .pos(Pos::new(HPos::Left, VPos::Center));
            picture.draw(&Text::new(row, (LEFT, y), style))?;
        }
        Ok(())
    }

    fn draw(&self, picture: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
        let dots = || self.lines.iter().flat_map(|line| &line.points);
        let top = dots()
            .map(|dot| dot.y.max(dot.spread.1))
            .fold(0.0, f64::max);
        let y = 0.0..if top > 0.0 { top * 1.06 } else { 1.0 };
        let mut builder = ChartBuilder::on(picture);
        builder
            .caption(&self.title, font())
            .margin_bottom(MARGIN)
            .margin_top(12)
            .margin_left(12)
            .margin_right(24);
        builder.x_label_area_size(44).y_label_area_size(LEFT - 12);
        let x = powers(dots().map(|dot| dot.bytes)).log_scale().base(2.0);
        let mut plot = builder.build_cartesian_2d(x, y)?;
        plot.configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style(font().into_font().color(&INK))
            .x_labels(14)
            .y_labels(10)
            .x_label_formatter(&|bytes| size(*bytes as usize))
            // Rounds, because three steps of 0.1 add up to 0.30000000000000004.
            .y_label_formatter(&|value| ((value * 1e6).round() / 1e6).to_string())
            .x_desc("size, bytes")
            .y_desc(self.quantity)
            .draw()?;
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let places: Vec<(f64, f64)> = line
                .points
                .iter()
                .map(|dot| (dot.bytes as f64, dot.y))
                .collect();
            plot.draw_series(
                places
                    .iter()
                    .map(|place| Circle::new(*place, RADIUS, colour.filled())),
            )?;
            let spread = line.points.iter().filter(|dot| dot.spread.0 < dot.spread.1);
            plot.draw_series(spread.map(|dot| {
                let (smallest, largest) = dot.spread;
                ErrorBar::new_vertical(
                    dot.bytes as f64,
                    smallest,
                    dot.y,
                    largest,
                    *colour,
                    2 * RADIUS as u32,
                )
            }))?;
            let stroke = colour.stroke_width(2);
            let series = plot.draw_series(LineSeries::new(places, stroke))?;
            if !line.points.is_empty() {
                series
                    .label(line.name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], stroke));
            }
        }
        let mut legend = plot.configure_series_labels();
        legend
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE)
            .label_font(font())
            .draw()?;
        Ok(())
    }
}

/// Returns the smallest range that has all sizes and goes from one power of 2 to a larger one. The
/// axis has its labels at powers of 2.
fn powers(sizes: impl Iterator<Item = u64>) -> Range<f64> {
    let (smallest, largest) = sizes.fold((u64::MAX, 1), |(smallest, largest), bytes| {
        (smallest.min(bytes), largest.max(bytes))
    });
    let from = smallest.min(largest).max(1).ilog2();
    let to = largest.next_power_of_two().ilog2();
    2_f64.powi(from as i32)..2_f64.powi(to.max(from + 1) as i32)
}

/// Returns the font's family and size. plotters divides the size by 1.24.
fn font() -> (&'static str, i32) {
    ("sans-serif", 16)
}

fn rows(text: &str) -> Vec<String> {
    let mut rows: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match rows
            .last_mut()
            .filter(|row| row.chars().count() + word.chars().count() < LINE_LETTERS)
        {
            Some(row) => *row += &format!(" {word}"),
            None => rows.push(word.to_owned()),
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_of_sizes_spans_whole_powers() {
        assert_eq!(powers([9, 60].into_iter()), 8.0..64.0);
        assert_eq!(powers([64].into_iter()), 64.0..128.0);
        assert_eq!(powers([8, 64 << 20].into_iter()), 8.0..67_108_864.0);
    }

    #[test]
    fn a_chart_has_axes_legend_captions_and_bars() {
        let dot = |bytes, y, spread| Dot { bytes, y, spread };
        let points = vec![dot(64, 12.5, (10.0, 20.0)), dot(65536, 0.0, (0.0, 0.0))];
        let lines = vec![
            Line {
                name: "a & b",
                points,
            },
            Line {
                name: "absent",
                points: Vec::new(),
            },
        ];
        let fabric = "where ".repeat(25);
        let mut chart = Chart {
            title: "title".to_owned(),
            fabric,
            points: "points: one",
            quantity: "GB/s",
            lines,
        };
        let svg = chart.render().unwrap();
        // An error bar is three strokes in the colour of its line.
        let strokes = |svg: &str| {
            svg.matches("<line opacity=\"1\" stroke=\"#0072B2\"")
                .count()
        };
        let host = format!("; host {}; {}", placement::local_host_name(), date::today());
        for part in [
            "title",
            "where where",
            &host,
            "points: one",
            "size, bytes",
            "GB/s",
            "a &amp; b",
            "64K",
            "#0072B2",
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(
            svg.ends_with("</svg>\n") && !svg.contains("absent"),
            "{svg}"
        );
        chart.lines[0].points[0].spread = (12.5, 12.5);
        assert_eq!(
            (strokes(&svg), strokes(&chart.render().unwrap())),
            (3, 0),
            "{svg}"
        );
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), "some", &chart).unwrap();
        chart.lines.clear();
        save(folder.path(), "none", &chart).unwrap();
        let names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names, ["some.svg"], "a chart without points is not written");
    }
}

//! Charts as SVG, drawn by plotters.
//!
//! A chart names the fabric that was measured, the host, the date, and the meaning of its points and
//! bars: it is shown without the page that it was made for, and the software fabric is no DGX Spark.

use crate::date;
use crate::output::numbers::{significant, size};
use crate::ranks::seats;
use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::element::DashedPathElement;
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
/// Colour of the limit.
const GREY: RGBColor = RGBColor(90, 90, 90);
/// Colour of axes and letters.
const INK: RGBColor = RGBColor(30, 30, 30);
const GRID: RGBColor = RGBColor(225, 225, 225);

const SIZE: (u32, u32) = (960, 604);
/// Left edge of the plot, and of the title, legend and captions.
const LEFT: i32 = 84;
/// Height of the title and the legend together, and of the captions.
const MARGIN: i32 = 84;
const LEGEND_Y: i32 = 64;
const LINE_HEIGHT: i32 = 20;
/// Letters in a line of the title or of a caption.
const LINE_LETTERS: usize = 112;

/// A chart.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Text above the chart; the first two lines of it are shown.
    pub title: String,
    /// Text below the chart: fabric, host and date, then the meaning of the points.
    pub captions: [String; 2],
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines, in the order in which they are drawn.
    pub lines: Vec<Line>,
    /// Vertical lines, each with a word.
    pub marks: Vec<(f64, String)>,
}

/// An axis.
#[derive(Debug, Clone)]
pub struct Axis {
    /// Quantity and unit.
    pub label: String,
    /// The mapping of values to places.
    pub scale: Scale,
}

/// Mapping of values to places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Linear from 0.
    Linear,
    /// Logarithmic, labelled with powers of 2 as sizes.
    Binary,
    /// Logarithmic, labelled with powers of 10.
    Decimal,
}

/// A line.
#[derive(Debug, Clone)]
pub struct Line {
    name: String,
    colour: RGBColor,
    is_limit: bool,
    is_faint: bool,
    /// True where its points are drawn too.
    pub dots: bool,
    /// The points from left to right.
    pub points: Vec<Dot>,
}

/// A point of a line.
#[derive(Debug, Clone, Copy)]
pub struct Dot {
    /// The x value.
    pub x: f64,
    /// The y value.
    pub y: f64,
    /// The least and the greatest y value there.
    pub spread: Option<(f64, f64)>,
}

/// The lines below a chart: fabric, host and date; then the meaning of `marks`.
pub fn captions(fabric: &str, marks: &str) -> [String; 2] {
    [format!("{fabric}; host {}; {}", seats::host(), date::today()), marks.to_owned()]
}

/// Makes the folder before the run, so that an unusable one ends it before anything is measured.
pub fn prepare(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("--plot {}", folder.display()))
}

/// Writes a chart that has points as `folder`/`name`.svg.
pub fn save(folder: &Path, name: &str, chart: &Chart) -> Result<()> {
    if chart.lines.iter().all(|line| line.points.is_empty()) {
        return Ok(());
    }
    let path = folder.join(format!("{name}.svg"));
    let svg = chart.render().with_context(|| format!("draw {name}.svg"))?;
    fs::write(&path, svg).with_context(|| format!("--plot {}", path.display()))
}

type Picture<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Chart {
    fn render(&self) -> Result<String> {
        let mut svg = String::new();
        let picture = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        picture.fill(&WHITE)?;
        self.draw_heads(&picture)?;
        let dots = || self.lines.iter().flat_map(|line| &line.points);
        let spreads = dots().filter_map(|dot| dot.spread).flat_map(|(least, most)| [least, most]);
        let x = self.x.scale.range(dots().map(|dot| dot.x));
        let y = self.y.scale.range(dots().map(|dot| dot.y).chain(spreads));
        let corner = (x.start, y.start);
        match (self.x.scale.base(), self.y.scale.base()) {
            (None, None) => self.draw(&picture, x, y, corner)?,
            (None, Some(base)) => self.draw(&picture, x, y.log_scale().base(base), corner)?,
            (Some(base), None) => self.draw(&picture, x.log_scale().base(base), y, corner)?,
            (Some(x_base), Some(y_base)) => {
                self.draw(&picture, x.log_scale().base(x_base), y.log_scale().base(y_base), corner)?;
            }
        }
        picture.present()?;
        drop(picture);
        Ok(svg)
    }

    /// Draws the title and the legend above the plot, and the captions below it.
    fn draw_heads(&self, picture: &Picture<'_>) -> Result<()> {
        let write = |text: &str, x: i32, y: i32| {
            let middle = Pos::new(HPos::Left, VPos::Center);
            let style = TextStyle::from(font().into_font()).color(&INK).pos(middle);
            picture.draw(&Text::new(text.to_owned(), (x, y), style))
        };
        for (row, y) in rows(&self.title).iter().take(2).zip((16..).step_by(LINE_HEIGHT as usize)) {
            write(row, LEFT, y)?;
        }
        let first = SIZE.1 as i32 - MARGIN + LINE_HEIGHT;
        let captions = self.captions.iter().flat_map(|caption| rows(caption));
        for (row, y) in captions.take(3).zip((first..).step_by(LINE_HEIGHT as usize)) {
            write(&row, LEFT, y)?;
        }
        let mut x = LEFT;
        for line in self.lines.iter().filter(|line| !line.points.is_empty()) {
            let ends = [(x, LEGEND_Y), (x + 30, LEGEND_Y)];
            match line.is_limit {
                true => picture.draw(&DashedPathElement::new(ends, 8, 5, line.style()))?,
                false => picture.draw(&PathElement::new(ends, line.style()))?,
            }
            if line.dots {
                picture.draw(&Circle::new((x + 15, LEGEND_Y), line.radius(), line.colour.filled()))?;
            }
            write(&line.name, x + 38, LEGEND_Y)?;
            x += 60 + 9 * line.name.chars().count() as i32;
        }
        Ok(())
    }

    /// Draws axes, marks and lines. Values below `corner` have no place on a logarithmic axis, and
    /// are drawn at its edge.
    fn draw<X, Y>(&self, picture: &Picture<'_>, x: X, y: Y, corner: (f64, f64)) -> Result<()>
    where
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut builder = ChartBuilder::on(picture);
        builder.margin_top(MARGIN).margin_bottom(MARGIN).margin_left(12).margin_right(24);
        let mut plot = builder.x_label_area_size(44).y_label_area_size(LEFT - 12).build_cartesian_2d(x, y)?;
        let label = |scale: Scale| move |value: &f64| scale.label(*value);
        let (x_label, y_label) = (label(self.x.scale), label(self.y.scale));
        plot.configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style(font().into_font().color(&INK))
            .x_labels(14)
            .y_labels(10)
            .x_label_formatter(&x_label)
            .y_label_formatter(&y_label)
            .x_desc(&self.x.label)
            .y_desc(&self.y.label)
            .draw()?;
        let top = plot.y_range().end;
        for (at, word) in &self.marks {
            plot.draw_series([PathElement::new([(*at, corner.1), (*at, top)], INK)])?;
            let style = TextStyle::from(font().into_font()).color(&INK);
            plot.draw_series([EmptyElement::at((*at, top)) + Text::new(word.clone(), (5, 4), style)])?;
        }
        for line in &self.lines {
            let (style, radius) = (line.style(), line.radius());
            let place = |dot: &Dot| (dot.x.max(corner.0), dot.y.max(corner.1));
            let places: Vec<(f64, f64)> = line.points.iter().map(place).collect();
            if line.dots {
                let dots = places.iter().map(|place| Circle::new(*place, radius, line.colour.filled()));
                plot.draw_series(dots)?;
            }
            let bar = |dot: &Dot| {
                let (least, most) = dot.spread.filter(|(least, most)| least < most)?;
                let ((x, y), least, most) = (place(dot), least.max(corner.1), most.max(corner.1));
                Some(ErrorBar::new_vertical(x, least, y, most, line.colour, 2 * radius as u32))
            };
            plot.draw_series(line.points.iter().filter_map(bar))?;
            match line.is_limit {
                true => plot.draw_series(DashedLineSeries::new(places, 8, 5, style))?,
                false => plot.draw_series(LineSeries::new(places, style))?,
            };
        }
        Ok(())
    }
}

impl Scale {
    /// The base of a logarithmic scale.
    fn base(self) -> Option<f64> {
        match self {
            Self::Linear => None,
            Self::Binary => Some(2.0),
            Self::Decimal => Some(10.0),
        }
    }

    /// Range of an axis for `values`. A logarithmic axis has labels at powers of its base, so it begins
    /// and ends at powers.
    fn range(self, values: impl Iterator<Item = f64>) -> Range<f64> {
        let base = self.base();
        let values = values.filter(|value| base.is_none() || *value > 0.0);
        let (least, most) =
            values.fold((f64::INFINITY, 0.0), |(least, most): (f64, f64), value| (least.min(value), most.max(value)));
        match base {
            None => 0.0..if most > 0.0 { most * 1.06 } else { 1.0 },
            Some(base) if most == 0.0 => 1.0..base,
            Some(base) => {
                let [from, to] = [(least.log(base) - 0.01).floor(), (most.log(base) + 0.01).ceil()];
                base.powf(from)..base.powf(to)
            }
        }
    }

    fn label(self, value: f64) -> String {
        match self {
            Self::Binary => size(value as usize),
            Self::Decimal if value >= 1e6 => format!("{}M", value / 1e6),
            Self::Decimal if value >= 1e3 => format!("{}k", value / 1e3),
            Self::Decimal if value < 1.0 => significant(value).trim_end_matches('0').to_owned(),
            // Steps such as 0.1 add up to 0.30000000000000004.
            Self::Linear | Self::Decimal => ((value * 1e6).round() / 1e6).to_string(),
        }
    }
}

impl Line {
    /// The line of library or network number `side`; a faint one is its second metric.
    pub fn new(name: String, side: usize, is_faint: bool) -> Self {
        let colour = COLOURS[side % COLOURS.len()];
        Self { name, colour, is_limit: false, is_faint, dots: true, points: Vec::new() }
    }

    /// The dashed line of the physical limit.
    pub fn limit() -> Self {
        let name = "payload limit".to_owned();
        Self { name, colour: GREY, is_limit: true, is_faint: false, dots: false, points: Vec::new() }
    }

    /// True for the line of the physical limit.
    pub fn is_limit(&self) -> bool {
        self.is_limit
    }

    /// Adds a point, unless it is not a number.
    pub fn add(&mut self, x: f64, y: f64, spread: Option<(f64, f64)>) {
        if x.is_finite() && y.is_finite() {
            self.points.push(Dot { x, y, spread });
        }
    }

    fn style(&self) -> ShapeStyle {
        self.colour.stroke_width(if self.is_faint { 1 } else { 2 })
    }

    fn radius(&self) -> i32 {
        if self.is_faint { 2 } else { 4 }
    }
}

/// plotters divides the size by 1.24.
fn font() -> (&'static str, i32) {
    ("sans-serif", 16)
}

/// Splits a text into lines of whole words.
fn rows(text: &str) -> Vec<String> {
    let mut rows: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match rows.last_mut().filter(|row| row.chars().count() + word.chars().count() < LINE_LETTERS) {
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
    fn logarithmic_axes_span_whole_powers() {
        let range = |scale: Scale, values: [f64; 2]| scale.range(values.into_iter());
        assert_eq!(range(Scale::Binary, [9.0, 60.0]), 8.0..64.0);
        assert_eq!(range(Scale::Binary, [64.0, 64.0]), 32.0..128.0);
        assert_eq!(range(Scale::Decimal, [0.0, 20.0]), 10.0..100.0);
        assert_eq!(range(Scale::Decimal, [0.0, 0.0]), 1.0..10.0);
        assert_eq!(range(Scale::Linear, [3.0, 100.0]), 0.0..106.0);
        assert_eq!(range(Scale::Linear, [0.0, 0.0]), 0.0..1.0);
    }

    #[test]
    fn labels_are_short() {
        let label = |scale: Scale, value: f64| scale.label(value);
        assert_eq!(label(Scale::Linear, 0.1 + 0.2), "0.3");
        assert_eq!(label(Scale::Binary, 65536.0), "64K");
        assert_eq!([0.1, 5.0, 20e3, 1e6].map(|value| label(Scale::Decimal, value)), ["0.1", "5", "20k", "1M"]);
    }

    /// Every pair of scales, with a point that a logarithmic axis has no place for.
    #[test]
    fn a_chart_has_axes_legend_captions_and_bars() {
        for (x, y) in [Scale::Linear, Scale::Binary, Scale::Decimal]
            .into_iter()
            .flat_map(|x| [Scale::Linear, Scale::Binary, Scale::Decimal].map(|y| (x, y)))
        {
            let mut line = Line::new("a & b".to_owned(), 0, false);
            line.add(0.0, 0.0, None);
            line.add(64.0, 12.5, Some((10.0, 20.0)));
            let mut limit = Line::limit();
            limit.add(64.0, 24.0, None);
            limit.add(128.0, 24.0, None);
            let axis = |label: &str, scale| Axis { label: label.to_owned(), scale };
            let chart = Chart {
                title: "title".to_owned(),
                captions: ["where".to_owned(), "word ".repeat(30)],
                x: axis("across", x),
                y: axis("upwards", y),
                lines: vec![line, limit],
                marks: vec![(100.0, "slowed".to_owned())],
            };
            let svg = chart.render().unwrap();
            let mut bare = chart.clone();
            bare.lines[0].points[1].spread = None;
            // An error bar is three strokes in the colour of its line.
            let strokes = |svg: &str| svg.matches("<line opacity=\"1\" stroke=\"#0072B2\"").count();
            assert_eq!((strokes(&svg), strokes(&bare.render().unwrap())), (3, 0), "{x:?}, {y:?}: {svg}");
            for part in ["title", "where", "word word", "across", "upwards", "a &amp; b", "payload limit", "slowed"] {
                assert!(svg.contains(part), "{x:?}, {y:?}, {part}: {svg}");
            }
            assert!(svg.contains("#0072B2") && svg.contains("#5A5A5A"), "{x:?}, {y:?}: {svg}");
            assert!(svg.ends_with("</svg>\n"), "{svg}");
        }
    }
}

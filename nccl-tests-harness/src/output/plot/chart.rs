//! A chart, and where its lines and letters go; `svg` and `png` put them there.

use crate::output::numbers::{significant, size};

/// Three bytes: red, green, blue.
pub type Colour = [u8; 3];

/// Colours that people who do not see all colours tell apart (Okabe and Ito).
pub const COLOURS: [Colour; 6] =
    [[0, 114, 178], [213, 94, 0], [0, 158, 115], [204, 121, 167], [230, 159, 0], [86, 180, 233]];
/// Of the limit.
pub const LIMIT: Colour = [90, 90, 90];
/// Of axes and letters.
pub const INK: Colour = [30, 30, 30];
/// Of the lines behind the chart.
pub const GRID: Colour = [225, 225, 225];

/// The picture's width.
pub const WIDTH: f64 = 960.0;
/// The picture's height.
pub const HEIGHT: f64 = 604.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = WIDTH - 24.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = HEIGHT - 124.0;
/// Letters of a title in a row: what has room in the font of the PNG.
const TITLE_LETTERS: usize = 112;

/// What is drawn.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Above it, two lines at most.
    pub titles: Vec<String>,
    /// Below it, three lines at most: what was measured on and when, and what the marks are.
    pub captions: Vec<String>,
    /// From left to right.
    pub x: Axis,
    /// From below.
    pub y: Axis,
    /// What is drawn.
    pub lines: Vec<Line>,
    /// Places on the x axis with a word.
    pub marks: Vec<(f64, String)>,
}

/// An axis.
#[derive(Debug, Clone)]
pub struct Axis {
    /// What it is, with the unit.
    pub label: String,
    /// How values become places.
    pub scale: Scale,
}

/// How values become places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// From 0.
    Linear,
    /// Each power of 2 as far from the next; labelled as sizes.
    Binary,
    /// Each power of 10 as far from the next.
    Decimal,
}

/// A line.
#[derive(Debug, Clone)]
pub struct Line {
    name: String,
    colour: Colour,
    dashed: bool,
    faint: bool,
    /// Whether its points are drawn.
    pub dots: bool,
    /// Its points from left to right.
    pub points: Vec<Dot>,
}

/// A point of a line.
#[derive(Debug, Clone, Copy)]
pub struct Dot {
    /// On the x axis.
    pub x: f64,
    /// On the y axis.
    pub y: f64,
    /// The least and the greatest value there.
    pub spread: Option<(f64, f64)>,
}

/// Something to draw, in places of the picture: (0, 0) is at the upper left.
#[derive(Debug, Clone, PartialEq)]
pub enum Mark {
    /// A line from point to point.
    Stroke {
        /// The points.
        points: Vec<(f64, f64)>,
        /// Its colour.
        colour: Colour,
        /// Its width.
        width: f64,
        /// Whether it has gaps.
        dashed: bool,
    },
    /// A disc.
    Disc {
        /// Its middle.
        at: (f64, f64),
        /// Its radius.
        radius: f64,
        /// Its colour.
        colour: Colour,
    },
    /// A line of letters.
    Text {
        /// Where: the middle of its height.
        at: (f64, f64),
        /// The letters.
        text: String,
        /// What `at` is of it.
        anchor: Anchor,
        /// Whether it goes from below upwards.
        upright: bool,
    },
}

/// Which end of a text is at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// Where it begins.
    Start,
    /// Its middle.
    Middle,
    /// Where it ends.
    End,
}

impl Line {
    /// The line of a library; a faint one is a second metric of it.
    pub fn new(name: String, side: usize, faint: bool) -> Self {
        Self { name, colour: COLOURS[side % COLOURS.len()], dashed: false, faint, dots: true, points: Vec::new() }
    }

    /// The line of the physical limit.
    pub fn limit() -> Self {
        let name = "payload limit".to_owned();
        Self { name, colour: LIMIT, dashed: true, faint: false, dots: false, points: Vec::new() }
    }

    /// Whether it is that.
    pub fn is_limit(&self) -> bool {
        self.dashed
    }

    /// Its name in the legend.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds a point, unless it is not a number.
    pub fn add(&mut self, x: f64, y: f64, spread: Option<(f64, f64)>) {
        if x.is_finite() && y.is_finite() {
            self.points.push(Dot { x, y, spread });
        }
    }
}

/// Values along an axis, and where they go.
struct Span {
    scale: Scale,
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Span {
    fn new(scale: Scale, values: impl Iterator<Item = f64>, start: f64, end: f64) -> Self {
        let values: Vec<f64> = values.filter(|value| scale == Scale::Linear || *value > 0.0).collect();
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (from, to) = match scale {
            Scale::Linear => (0.0, if most > 0.0 { most * 1.06 } else { 1.0 }),
            _ if values.is_empty() => (1.0, 10.0),
            Scale::Binary => (least / 1.3, most * 1.3),
            Scale::Decimal => (least / 1.6, most * 1.6),
        };
        Self { scale, from, to, start, end }
    }

    fn place(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.from) / (self.to - self.from),
            _ => (value.max(self.from) / self.from).ln() / (self.to / self.from).ln(),
        };
        self.start + part * (self.end - self.start)
    }

    /// Values with a label each.
    fn ticks(&self) -> Vec<(f64, String)> {
        let inside = |value: &f64| *value >= self.from && *value <= self.to * 1.000_001;
        match self.scale {
            Scale::Linear => {
                let step = nice_step(self.to - self.from);
                let decimals = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
                let count = ((self.to - self.from) / step) as usize;
                (0..=count).map(|at| at as f64 * step).map(|value| (value, format!("{value:.decimals$}"))).collect()
            }
            Scale::Binary => {
                let powers: Vec<f64> = (0..64).map(|power| 2_f64.powi(power)).filter(inside).collect();
                let every = powers.len().div_ceil(14);
                powers.into_iter().step_by(every.max(1)).map(|value| (value, size(value as usize))).collect()
            }
            Scale::Decimal => {
                let few = (self.to / self.from).log10() < 2.0;
                let steps = if few { &[1.0, 2.0, 5.0][..] } else { &[1.0] };
                let values = (-9..12).flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)));
                values.filter(inside).map(|value| (value, plain(value))).collect()
            }
        }
    }
}

/// 1, 2 or 5 times a power of 10: five to eleven of them make `length`.
fn nice_step(length: f64) -> f64 {
    let power = 10_f64.powf((length / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().rev().find(|step| length / step >= 5.0).unwrap_or(power)
}

fn plain(value: f64) -> String {
    match value {
        1e6.. => format!("{}M", value / 1e6),
        1e3.. => format!("{}k", value / 1e3),
        1.0.. => value.to_string(),
        _ => significant(value).trim_end_matches('0').to_owned(),
    }
}

impl Chart {
    /// Whether there is anything to see.
    pub fn has_points(&self) -> bool {
        self.lines.iter().any(|line| !line.points.is_empty())
    }

    /// All of it, in the order in which it is drawn.
    pub fn drawing(&self) -> Vec<Mark> {
        let dots = || self.lines.iter().flat_map(|line| &line.points);
        let x = Span::new(self.x.scale, dots().map(|dot| dot.x), LEFT, RIGHT);
        let spreads = dots().filter_map(|dot| dot.spread).flat_map(|(least, most)| [least, most]);
        let y = Span::new(self.y.scale, dots().map(|dot| dot.y).chain(spreads), BOTTOM, TOP);
        let mut marks = Vec::new();
        self.axes(&x, &y, &mut marks);
        for (at, word) in &self.marks {
            let place = x.place(*at);
            marks.push(stroke(vec![(place, TOP), (place, BOTTOM)], INK, 0.8, false));
            marks.push(text((place + 5.0, TOP + 10.0), word, Anchor::Start));
        }
        for line in &self.lines {
            line.draw(&x, &y, &mut marks);
        }
        self.heads(&mut marks);
        marks
    }

    fn axes(&self, x: &Span, y: &Span, marks: &mut Vec<Mark>) {
        for (value, label) in x.ticks() {
            let place = x.place(value);
            marks.push(stroke(vec![(place, TOP), (place, BOTTOM)], GRID, 1.0, false));
            marks.push(text((place, BOTTOM + 16.0), &label, Anchor::Middle));
        }
        for (value, label) in y.ticks() {
            let place = y.place(value);
            marks.push(stroke(vec![(LEFT, place), (RIGHT, place)], GRID, 1.0, false));
            marks.push(text((LEFT - 8.0, place), &label, Anchor::End));
        }
        marks.push(stroke(vec![(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], INK, 1.2, false));
        marks.push(text(((LEFT + RIGHT) / 2.0, BOTTOM + 38.0), &self.x.label, Anchor::Middle));
        let at = (18.0, (TOP + BOTTOM) / 2.0);
        marks.push(Mark::Text { at, text: self.y.label.clone(), anchor: Anchor::Middle, upright: true });
    }

    /// Title and legend above the chart and captions below it, where no line can be.
    fn heads(&self, marks: &mut Vec<Mark>) {
        let captions = self.captions.iter().flat_map(|caption| rows(caption));
        for (at, row) in captions.take(3).enumerate() {
            marks.push(text((LEFT, BOTTOM + 66.0 + 20.0 * at as f64), &row, Anchor::Start));
        }
        let rows = self.titles.iter().flat_map(|title| rows(title));
        for (at, row) in rows.take(2).enumerate() {
            marks.push(text((LEFT, 16.0 + 20.0 * at as f64), &row, Anchor::Start));
        }
        let mut at = LEFT;
        for line in self.lines.iter().filter(|line| !line.points.is_empty()) {
            let (colour, width) = (line.colour, line.width());
            marks.push(stroke(vec![(at, 64.0), (at + 30.0, 64.0)], colour, width, line.dashed));
            if line.dots {
                marks.push(Mark::Disc { at: (at + 15.0, 64.0), radius: line.radius(), colour });
            }
            marks.push(text((at + 38.0, 64.0), &line.name, Anchor::Start));
            at += 60.0 + 10.0 * line.name.chars().count() as f64;
        }
    }
}

impl Line {
    fn width(&self) -> f64 {
        if self.faint { 1.0 } else { 2.0 }
    }

    fn radius(&self) -> f64 {
        if self.faint { 2.5 } else { 4.0 }
    }

    fn draw(&self, x: &Span, y: &Span, marks: &mut Vec<Mark>) {
        let places: Vec<(f64, f64)> = self.points.iter().map(|dot| (x.place(dot.x), y.place(dot.y))).collect();
        for (dot, (at, _)) in self.points.iter().zip(&places) {
            let Some((least, most)) = dot.spread.filter(|(least, most)| least < most) else { continue };
            let (low, high) = (y.place(least), y.place(most));
            marks.push(stroke(vec![(*at, low), (*at, high)], self.colour, 1.0, false));
            for end in [low, high] {
                marks.push(stroke(vec![(at - 3.0, end), (at + 3.0, end)], self.colour, 1.0, false));
            }
        }
        if self.dots {
            let disc = |at: &(f64, f64)| Mark::Disc { at: *at, radius: self.radius(), colour: self.colour };
            marks.extend(places.iter().map(disc));
        }
        marks.push(stroke(places, self.colour, self.width(), self.dashed));
    }
}

/// Rows of whole words.
fn rows(title: &str) -> Vec<String> {
    let mut rows: Vec<String> = Vec::new();
    for word in title.split_whitespace() {
        match rows.last_mut().filter(|row| row.chars().count() + word.chars().count() < TITLE_LETTERS) {
            Some(row) => *row += &format!(" {word}"),
            None => rows.push(word.to_owned()),
        }
    }
    rows
}

fn stroke(points: Vec<(f64, f64)>, colour: Colour, width: f64, dashed: bool) -> Mark {
    Mark::Stroke { points, colour, width, dashed }
}

fn text(at: (f64, f64), text: &str, anchor: Anchor) -> Mark {
    Mark::Text { at, text: text.to_owned(), anchor, upright: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_within_the_axis() {
        let labels = |span: Span| span.ticks().into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        let span = |scale, values: [f64; 2]| Span::new(scale, values.into_iter(), 0.0, 100.0);
        assert_eq!(labels(span(Scale::Linear, [0.0, 24.4])), ["0", "5", "10", "15", "20", "25"]);
        assert_eq!(labels(span(Scale::Linear, [0.1, 0.47]))[..3], ["0.00", "0.05", "0.10"]);
        assert_eq!(labels(span(Scale::Binary, [8.0, 64.0])), ["8", "16", "32", "64"]);
        assert_eq!(labels(span(Scale::Decimal, [1.0, 2000.0])), ["1", "10", "100", "1k"]);
        assert_eq!(labels(span(Scale::Decimal, [1.0, 9.0])), ["1", "2", "5", "10"]);
        assert_eq!(labels(span(Scale::Binary, [4096.0, (1_u64 << 24) as f64])).len(), 13);
    }

    #[test]
    fn values_go_where_the_scale_puts_them() {
        let span = Span { scale: Scale::Decimal, from: 1.0, to: 100.0, start: 0.0, end: 200.0 };
        assert!((span.place(10.0) - 100.0).abs() < 1e-9 && span.place(0.5) == 0.0);
        let upwards = Span { scale: Scale::Linear, from: 0.0, to: 4.0, start: 100.0, end: 0.0 };
        assert_eq!((upwards.place(1.0), upwards.place(4.0)), (75.0, 0.0));
        assert_eq!(rows(&"word ".repeat(30)).len(), 2);
    }
}

//! The results as pictures, SVG and PNG alike.
//!
//! Drawn by hand: a chart is a few lines, texts and ticks. plotters writes text into its bitmaps only with a font of the
//! system's or one that is shipped, and resvg needs fonts of the system's too; a node of a cluster may have none. The PNG's
//! letters come with `noto-sans-mono-bitmap`, which has no dependencies, and its lines are `png`'s, so nothing but the
//! `png` crate is added.

pub mod chart;
mod png;
mod svg;

use super::Scenario;
use super::figures::{Metric, Place, Point};
use super::limit::Limit;
use super::slowdown::Course;
use anyhow::{Context, Result};
use chart::{Axis, Chart, Line, Scale};
use std::fs;
use std::path::Path;

/// What is told of a scenario, besides its points.
pub struct Subject<'a> {
    /// Over the picture.
    pub title: &'a str,
    /// Of the sides.
    pub names: &'a [&'static str],
    /// With all rails whole, and with the one fallen that falls.
    pub limits: [Limit; 2],
}

/// Writes the pictures of a scenario into `folder`.
///
/// # Errors
/// When they cannot be written.
pub fn write(
    folder: &Path,
    scenario: Scenario,
    subject: &Subject<'_>,
    points: &[Point],
    courses: &[Course],
) -> Result<()> {
    let name = scenario.name();
    let charts = match scenario {
        Scenario::Slowdown => vec![(name.to_owned(), course(subject, courses))],
        Scenario::Connections => {
            let of = |(metric, name): (&[usize], &str)| (name.to_owned(), by_place(subject, points, metric));
            [(&[0][..], "connections"), (&[1], "connections-time"), (&[2, 3], "connections-memory")].map(of).to_vec()
        }
        Scenario::Latency => vec![(name.to_owned(), by_place(subject, points, &[0, 1]))],
        _ => vec![(name.to_owned(), by_place(subject, points, &[0]))],
    };
    charts.iter().try_for_each(|(name, chart)| save(folder, name, chart))
}

/// Writes a chart that has points as `folder`/`name`.svg and .png.
///
/// # Errors
/// When they cannot be written.
pub fn save(folder: &Path, name: &str, chart: &Chart) -> Result<()> {
    if !chart.has_points() {
        return Ok(());
    }
    let put = |ending: &str, bytes: Vec<u8>| {
        let path = folder.join(format!("{name}.{ending}"));
        fs::write(&path, bytes).with_context(|| format!("--plot {}", path.display()))
    };
    put("svg", svg::render(chart).into_bytes())?;
    put("png", png::render(chart).with_context(|| format!("draw {name}.png"))?)
}

/// Makes the folder, before the run: it shall not be found unusable after it.
///
/// # Errors
/// When it cannot be made.
pub fn prepare(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("--plot {}", folder.display()))
}

/// Some metrics of the same unit, over sizes or connections, with the limit of the first.
fn by_place(subject: &Subject<'_>, points: &[Point], metrics: &[usize]) -> Chart {
    let mut lines = Vec::new();
    let metric_at = |at: usize| points.first().and_then(|point| Some(point.sides.first()?.get(at)?.metric));
    let first = metrics.first().and_then(|at| metric_at(*at)).unwrap_or(Metric::Bandwidth);
    let most = points.iter().filter_map(|point| Some(point.sides.first()?.first()?.median())).fold(0.0, f64::max);
    let (unit, factor) = unit(first, most);
    for (number, at) in metrics.iter().enumerate() {
        for (side, name) in subject.names.iter().enumerate() {
            let Some(metric) = metric_at(*at) else { continue };
            let name = if metrics.len() > 1 { format!("{name} {}", short(metric)) } else { (*name).to_owned() };
            let mut line = Line::new(name, side, number > 0);
            for point in points {
                let Some(series) = point.sides.get(side).and_then(|side| side.get(*at)) else { continue };
                let (least, most) = series.spread();
                line.add(x_of(point.place), series.median() * factor, Some((least * factor, most * factor)));
            }
            lines.push(line);
        }
    }
    if metrics.first() == Some(&0) {
        let mut line = Line::limit();
        for point in points {
            if let Some(limit) = point.limit {
                line.add(x_of(point.place), limit * factor, None);
            }
        }
        lines.push(line);
    }
    let is_size = points.iter().any(|point| matches!(point.place, Place::Size(_)));
    let x =
        Axis { label: if is_size { "message size, bytes" } else { "connections" }.to_owned(), scale: Scale::Binary };
    let y_scale = match first {
        Metric::Bandwidth | Metric::SenderMemory | Metric::Connect => Scale::Linear,
        _ => Scale::Decimal,
    };
    let (titles, y) = (vec![subject.title.to_owned()], Axis { label: unit.to_owned(), scale: y_scale });
    Chart { titles, x, y, lines, marks: Vec::new() }
}

/// Throughput over time, of the first round of each side.
fn course(subject: &Subject<'_>, courses: &[Course]) -> Chart {
    let most = courses.iter().flat_map(|course| &course.bandwidth_gb_s).copied().fold(0.0, f64::max);
    let (unit, factor) = unit(Metric::Bandwidth, most);
    let first: Vec<&Course> = courses.iter().filter(|course| course.round == 0).collect();
    let (mut lines, mut marks, mut limits) = (Vec::new(), Vec::new(), Vec::new());
    for (side, name) in subject.names.iter().enumerate() {
        let Some(course) = first.iter().find(|course| course.side == *name) else { continue };
        let mut line = Line::new((*name).to_owned(), side, false);
        line.dots = false;
        let window_s = course.window_ms as f64 / 1e3;
        let whole = course.bandwidth_gb_s.len().saturating_sub(1);
        for (at, gb_s) in course.bandwidth_gb_s[..whole].iter().enumerate() {
            line.add((at as f64 + 0.5) * window_s, gb_s * factor, None);
        }
        lines.push(line);
        if side == 0 {
            marks = vec![(course.fall_s, "falls".to_owned()), (course.return_s, "returns".to_owned())];
            let end = whole as f64 * window_s;
            let mut limit = Line::limit();
            let [whole, fallen] = subject.limits.map(|limit| limit.gb_s());
            let steps = [(0.0, whole), (course.fall_s, whole), (course.fall_s, fallen), (course.return_s, fallen)];
            for (at, gb_s) in steps.into_iter().chain([(course.return_s, whole), (end, whole)]) {
                // Without a limit of the fallen rails the line of the whole ones goes on.
                if let Some(gb_s) = gb_s {
                    limit.add(at, gb_s * factor, None);
                }
            }
            limits.push(limit);
        }
    }
    lines.append(&mut limits);
    let x = Axis { label: "seconds".to_owned(), scale: Scale::Linear };
    let y = Axis { label: unit.to_owned(), scale: Scale::Linear };
    Chart { titles: vec![subject.title.to_owned()], x, y, lines, marks }
}

/// What is written at the axis, and the factor to that.
fn unit(metric: Metric, most: f64) -> (&'static str, f64) {
    match metric {
        Metric::Bandwidth if most < 1.0 => ("MB/s", 1e3),
        Metric::Bandwidth => ("GB/s", 1.0),
        Metric::Rate => ("messages/s", 1.0),
        Metric::P50 | Metric::P99 | Metric::Least => ("half a round trip, us", 1.0),
        Metric::Connect => ("ms to connect one", 1.0),
        Metric::SenderMemory | Metric::ReceiverMemory => ("KiB of memory for each connection", 1.0),
    }
}

fn short(metric: Metric) -> &'static str {
    match metric {
        Metric::P50 => "p50",
        Metric::P99 => "p99",
        Metric::SenderMemory => "sender",
        Metric::ReceiverMemory => "receiver",
        other => other.head(),
    }
}

fn x_of(place: Place) -> f64 {
    match place {
        Place::Size(count) | Place::Connections(count) => count as f64,
        Place::Phase(_) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::Series;
    use super::*;

    fn point(bytes: usize, values: [f64; 2], limit: Option<f64>) -> Point {
        let side =
            |value: f64| vec![Series { metric: Metric::Bandwidth, rounds: vec![value, value * 1.1, value * 0.9] }];
        Point { place: Place::Size(bytes), limit, sides: values.map(side).to_vec(), wrong: None }
    }

    #[test]
    fn pictures_are_written_with_both_sides_and_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let points = [point(4096, [5.0, 3.0], Some(24.0)), point(65536, [12.0, 9.0], Some(24.0))];
        let (names, limits) = (["ours", "theirs"], [Limit::default(); 2]);
        let subject = Subject { title: "bandwidth & <more>", names: &names, limits };
        write(folder.path(), Scenario::Bandwidth, &subject, &points, &[]).unwrap();
        let svg = fs::read_to_string(folder.path().join("bandwidth.svg")).unwrap();
        for part in
            ["ours", "theirs", "physical limit", "stroke-dasharray", "bandwidth &amp; &lt;more&gt;", "GB/s", "64K"]
        {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        let decoder = ::png::Decoder::new(std::io::Cursor::new(fs::read(folder.path().join("bandwidth.png")).unwrap()));
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let has = |colour: [u8; 3]| pixels.chunks_exact(3).any(|pixel| pixel == colour);
        assert!(chart::COLOURS.iter().take(2).all(|colour| has(*colour)) && has([255; 3]) && has(chart::LIMIT));
    }

    #[test]
    fn a_course_has_its_marks_and_the_limit_its_steps() {
        let limit = |mbps| Limit { payload_mbps: Some(mbps), latency_us: 0.0 };
        let course_of = |side, round| Course {
            side,
            round,
            window_ms: 100,
            bandwidth_gb_s: vec![0.4; 90],
            fall_s: 3.0,
            return_s: 6.0,
        };
        let names = ["ours", "theirs"];
        let subject = Subject { title: "slowdown", names: &names, limits: [limit(4000.0), limit(1000.0)] };
        let chart = course(&subject, &[course_of("ours", 0), course_of("theirs", 0), course_of("ours", 1)]);
        assert_eq!((chart.lines.len(), chart.marks.len(), chart.y.label.as_str()), (3, 2, "MB/s"));
        let limit = chart.lines.iter().find(|line| line.is_limit()).unwrap();
        assert_eq!(limit.points[1..4].iter().map(|point| point.y).collect::<Vec<_>>(), [500.0, 125.0, 125.0]);
    }

    #[test]
    fn nothing_measured_is_no_picture() {
        let folder = tempfile::tempdir().unwrap();
        let subject = Subject { title: "t", names: &["ours"], limits: [Limit::default(); 2] };
        write(folder.path(), Scenario::Slowdown, &subject, &[], &[]).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

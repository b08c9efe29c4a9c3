//! The charts of each scenario.

use super::figures::{Metric, Place, Point};
use super::plan::Scenario;
use super::slowdown::Course;
use anyhow::Result;
use nccl_tests_harness::fabric::limit::Limit;
use nccl_tests_harness::output::plot::{Axis, Chart, Line, Scale, captions, save};
use std::path::Path;

/// A scenario, besides its points.
pub struct Subject<'a> {
    /// The title.
    pub title: &'a str,
    /// What the figures were measured on.
    pub caption: &'a str,
    /// Rounds of each point.
    pub rounds: u32,
    /// The names of the libraries.
    pub names: &'a [&'static str],
    /// With all rails at full rate, and with one slowed.
    pub limits: [Limit; 2],
}

/// Writes the charts of a scenario into `folder`.
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

/// Some metrics of the same unit, over sizes or connections, with the limit of the first.
fn by_place(subject: &Subject<'_>, points: &[Point], metrics: &[usize]) -> Chart {
    let mut lines = Vec::new();
    let metric_at = |at: usize| points.first().and_then(|point| Some(point.sides.first()?.get(at)?.metric));
    let first = metrics.first().and_then(|at| metric_at(*at)).unwrap_or(Metric::Bandwidth);
    for (number, at) in metrics.iter().enumerate() {
        for (side, name) in subject.names.iter().enumerate() {
            let Some(metric) = metric_at(*at) else { continue };
            let name = if metrics.len() > 1 { format!("{name} {}", short(metric)) } else { (*name).to_owned() };
            let mut line = Line::new(name, side, number > 0);
            for point in points {
                let Some(series) = point.sides.get(side).and_then(|side| side.get(*at)) else { continue };
                let (least, most) = series.spread();
                line.add(x_of(&point.place), series.median(), Some((least, most)));
            }
            lines.push(line);
        }
    }
    if metrics.first() == Some(&0) {
        let mut line = Line::limit();
        for point in points {
            if let Some(limit) = point.limit {
                line.add(x_of(&point.place), limit, None);
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
    let y = Axis { label: unit(first).to_owned(), scale: y_scale };
    let rounds = subject.rounds;
    let marks = match rounds {
        1 => "points: 1 round".to_owned(),
        _ => format!("points: median of {rounds} rounds; bars: slowest to fastest round"),
    };
    subject.chart(&marks, [x, y], lines, Vec::new())
}

/// Throughput over time, in the first round of each library.
fn course(subject: &Subject<'_>, courses: &[Course]) -> Chart {
    let first: Vec<&Course> = courses.iter().filter(|course| course.round == 0).collect();
    let (mut lines, mut marks, mut limits) = (Vec::new(), Vec::new(), Vec::new());
    for (side, name) in subject.names.iter().enumerate() {
        let Some(course) = first.iter().find(|course| course.side == *name) else { continue };
        let mut line = Line::new((*name).to_owned(), side, false);
        line.dots = false;
        let window_s = course.window_ms as f64 / 1e3;
        let whole = course.bandwidth_gb_s.len().saturating_sub(1);
        for (at, gb_s) in course.bandwidth_gb_s[..whole].iter().enumerate() {
            line.add((at as f64 + 0.5) * window_s, *gb_s, None);
        }
        lines.push(line);
        if side == 0 {
            marks = vec![(course.fall_s, "rail slowed".to_owned()), (course.return_s, "rail restored".to_owned())];
            let end = whole as f64 * window_s;
            let mut limit = Line::limit();
            let [whole, slowed] = subject.limits.map(|limit| limit.gb_s());
            let steps = [(0.0, whole), (course.fall_s, whole), (course.fall_s, slowed), (course.return_s, slowed)];
            for (at, gb_s) in steps.into_iter().chain([(course.return_s, whole), (end, whole)]) {
                // Where the limit with the slowed rail is not known, the line stays.
                if let Some(gb_s) = gb_s {
                    limit.add(at, gb_s, None);
                }
            }
            limits.push(limit);
        }
    }
    lines.append(&mut limits);
    let x = Axis { label: "time, s".to_owned(), scale: Scale::Linear };
    let y = Axis { label: unit(Metric::Bandwidth).to_owned(), scale: Scale::Linear };
    let window_ms = first.first().map_or(0, |course| course.window_ms);
    let rounds =
        if subject.rounds == 1 { "1 round".to_owned() } else { format!("the first of {} rounds", subject.rounds) };
    let words = format!("{rounds}, received per {window_ms} ms");
    subject.chart(&words, [x, y], lines, marks)
}

impl Subject<'_> {
    /// `words` say what the points are.
    fn chart(&self, words: &str, [x, y]: [Axis; 2], lines: Vec<Line>, marks: Vec<(f64, String)>) -> Chart {
        let has_limit = lines.iter().any(|line| line.is_limit() && !line.points.is_empty());
        let limit = if has_limit { "; dashed: what the links allow, headers not counted" } else { "" };
        let captions = captions(self.caption, &format!("{words}{limit}"));
        Chart { title: self.title.to_owned(), captions, x, y, lines, marks }
    }
}

/// The y axis's label: the unit is the table's.
fn unit(metric: Metric) -> &'static str {
    match metric {
        Metric::Bandwidth => "GB/s of payload",
        Metric::Rate => "messages/s",
        Metric::P50 | Metric::P99 | Metric::Least => "half a round trip, us",
        Metric::Connect => "ms to connect each",
        Metric::SenderMemory | Metric::ReceiverMemory => "memory of each connection, KiB",
    }
}

fn short(metric: Metric) -> &'static str {
    match metric {
        Metric::P50 => "p50",
        Metric::P99 => "p99",
        Metric::SenderMemory => "sender",
        Metric::ReceiverMemory => "receiver",
        other => other.head()[1],
    }
}

fn x_of(place: &Place) -> f64 {
    match place {
        Place::Size(count) | Place::Connections(count) => *count as f64,
        Place::Phase(_) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::Series;
    use super::*;
    use nccl_tests_harness::ranks::seats;
    use std::fs;

    fn point(bytes: usize, values: [f64; 2], limit: Option<f64>) -> Point {
        let side =
            |value: f64| vec![Series { metric: Metric::Bandwidth, rounds: vec![value, value * 1.1, value * 0.9] }];
        Point { place: Place::Size(bytes), limit, sides: values.map(side).to_vec(), wrong: None }
    }

    #[test]
    fn charts_say_what_they_show_and_where_it_was_measured() {
        let folder = tempfile::tempdir().unwrap();
        let points = [point(4096, [5.0, 3.0], Some(24.0)), point(65536, [12.0, 9.0], Some(24.0))];
        let (names, limits) = (["ours", "theirs"], [Limit::default(); 2]);
        let caption = "software fabric, profile spark-1cable, rates x 0.1";
        let subject = Subject { title: "bandwidth & <more>", caption, rounds: 3, names: &names, limits };
        write(folder.path(), Scenario::Bandwidth, &subject, &points, &[]).unwrap();
        let svg = fs::read_to_string(folder.path().join("bandwidth.svg")).unwrap();
        let place = format!("{caption}; host {}; ", seats::host());
        let points = "points: median of 3 rounds; bars: slowest to fastest round; dashed: what the links allow,";
        let all = [
            "ours",
            "theirs",
            "payload limit",
            "bandwidth &amp; &lt;more&gt;",
            "GB/s of payload",
            "64K",
            points,
            &place,
        ];
        for part in all {
            assert!(svg.contains(part), "{part}: {svg}");
        }
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
        let limits = [limit(4000.0), limit(1000.0)];
        let subject = Subject { title: "slowdown", caption: "x", rounds: 2, names: &names, limits };
        let chart = course(&subject, &[course_of("ours", 0), course_of("theirs", 0), course_of("ours", 1)]);
        assert_eq!((chart.lines.len(), chart.marks.len(), chart.y.label.as_str()), (3, 2, "GB/s of payload"));
        let limit = chart.lines.iter().find(|line| line.is_limit()).unwrap();
        assert_eq!(limit.points[1..4].iter().map(|point| point.y).collect::<Vec<_>>(), [0.5, 0.125, 0.125]);
    }

    #[test]
    fn nothing_measured_is_no_picture() {
        let folder = tempfile::tempdir().unwrap();
        let (names, limits) = (["ours"], [Limit::default(); 2]);
        let subject = Subject { title: "t", caption: "x", rounds: 1, names: &names, limits };
        write(folder.path(), Scenario::Slowdown, &subject, &[], &[]).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

//! The screen and the keys of `nccl-spark top`. Has no I/O: the drawn cells depend only on the
//! [`View`] and on the size of the terminal.
//!
//! A line of the table has a name (of a job, peer or rail) and figures. Before the name is a mark:
//! `!` for a lost rail, `~` for a slow one, else a space.

use super::columns::{self, Column, mark};
use super::lines;
use super::rates::{Job, Snapshot};
use super::rows::{self, Condition, Row};
use crate::output::numbers::count;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use std::time::Duration;

/// Minimum width of the name with its mark. A terminal that is 20 characters wide has room for this
/// width and the first figure.
const LEAST_NAME: usize = 11;
/// Maximum width of the name with its mark.
const MOST_NAME: usize = 44;
/// Number of figures that are shown even if rails' names must be cut for them. Further figures are
/// omitted instead.
const FIRST_FIGURES: usize = 2;
const HELP: [&str; 15] = [
    "q, Esc, Ctrl-C  end",
    "p               pause, go on",
    "s               order by pid, rate, rank",
    "d               split rails by peer",
    "arrows, PgUp, PgDn, Home, End  scroll",
    "?               this help",
    "",
    "!  lost: a connection goes without the rail",
    "~  slow: below half of the busiest rail",
    "out, in  payload of this interval",
    "carry    connections that the rail carries",
    "mean     post to confirmation, this interval",
    "losses, returns, stalls  since the start",
    "stuck    why connections wait now",
    "docs/guide/monitoring.md says more",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Order {
    #[default]
    Pid,
    /// Highest rate first. The rates of both directions are added up.
    Rate,
    Rank,
}

const ORDERS: [(Order, &str); 3] = [
    (Order::Pid, "pid"),
    (Order::Rate, "rate"),
    (Order::Rank, "rank"),
];

impl Order {
    fn next(self) -> Self {
        let at = ORDERS
            .iter()
            .position(|(order, _)| *order == self)
            .unwrap_or_default();
        ORDERS[(at + 1) % ORDERS.len()].0
    }

    fn name(self) -> &'static str {
        ORDERS
            .iter()
            .find(|(order, _)| *order == self)
            .map_or("", |(_, name)| name)
    }

    /// Sorts `jobs`. They must already be sorted by process number, because [`Order::Pid`] changes
    /// nothing.
    fn sort(self, jobs: &mut [(&Job, Vec<Row>)]) {
        let rate = |rows: &[Row]| rows.first().map_or(0.0, Row::bytes_per_s);
        match self {
            Self::Pid => {}
            Self::Rate => jobs.sort_by(|(_, a), (_, b)| rate(b).total_cmp(&rate(a))),
            Self::Rank => jobs.sort_by_key(|(job, _)| (job.seen.rank.is_none(), job.seen.rank)),
        }
    }
}

#[derive(Debug)]
pub struct View {
    snapshot: Option<Snapshot>,
    by_peer: bool,
    order: Order,
    is_paused: bool,
    is_help: bool,
    scroll: usize,
    interval: Duration,
    has_colours: bool,
}

struct Line {
    name: String,
    row: Row,
}

impl Line {
    /// Returns the width of a rail's name with its mark, or 0 for other names, which may be cut.
    fn room(&self) -> usize {
        if self.row.rail.is_some() {
            1 + self.name.chars().count()
        } else {
            0
        }
    }

    /// Fits mark and name into `width` characters. Cuts a rail's name at the start, because rails'
    /// names differ at the end. Cuts other names at the end.
    fn name_in(&self, width: usize) -> String {
        let mark = mark(self.row.condition).0;
        let cut = if self.row.rail.is_some() {
            self.room().saturating_sub(width)
        } else {
            0
        };
        let rest = self.name.chars().skip(cut);
        mark.chars().chain(rest).take(width).collect()
    }
}

impl View {
    pub fn new(by_peer: bool, interval: Duration, has_colours: bool) -> Self {
        let order = Order::default();
        let scroll = 0;
        Self {
            snapshot: None,
            by_peer,
            order,
            is_paused: false,
            is_help: false,
            scroll,
            interval,
            has_colours,
        }
    }

    pub fn show(&mut self, snapshot: Snapshot) {
        if !self.is_paused || self.snapshot.is_none() {
            self.snapshot = Some(snapshot);
        }
    }

    /// Handles a key in a terminal of `height` lines. Returns true if the key ends the program.
    pub fn press(&mut self, key: KeyEvent, height: u16) -> bool {
        let [.., body, _] = layout(Rect {
            height,
            ..Rect::default()
        });
        let page = usize::from(body.height).max(1);
        let last = self.lines().len().saturating_sub(page);
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => return true,
            _ if is_control => {}
            KeyCode::Esc if self.is_help => self.is_help = false,
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('?' | 'h') => self.is_help = !self.is_help,
            KeyCode::Char('p') => self.is_paused = !self.is_paused,
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('d') => {
                self.by_peer = !self.by_peer;
                self.scroll = 0;
            }
            KeyCode::Up => self.scroll = self.scroll.min(last).saturating_sub(1),
            KeyCode::Down => self.scroll = (self.scroll + 1).min(last),
            KeyCode::PageUp => self.scroll = self.scroll.min(last).saturating_sub(page),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(page).min(last),
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = last,
            _ => {}
        }
        false
    }

    pub fn draw(&self, area: Rect, buffer: &mut Buffer) {
        let width = usize::from(area.width);
        let [title, head, body, footer] = layout(area);
        let mut put = |row: Rect, text: &str, style: Style| {
            if row.height > 0 {
                buffer.set_stringn(row.x, row.y, text, width, style);
            }
        };
        put(
            title,
            &self.title(),
            Style::new().add_modifier(Modifier::BOLD),
        );
        put(footer, &self.footer(), Style::new());
        let lines = self.lines();
        if self.is_help {
            body.rows()
                .zip(HELP)
                .for_each(|(row, text)| put(row, text, Style::new()));
            return;
        }
        if lines.is_empty() {
            let text = if self.snapshot.is_some() {
                "no job here uses NCCL over this plugin"
            } else {
                "looking"
            };
            put(body, text, Style::new());
            return;
        }
        let (name_width, columns) =
            columns_for(width, lines.iter().map(Line::room).max().unwrap_or(0));
        let names = columns
            .iter()
            .map(|column| format!(" {:>1$}", column.name, column.width));
        let text = format!("{:name_width$}{}", " job, rail", names.collect::<String>());
        put(
            head,
            &format!("{text:width$}"),
            Style::new().add_modifier(Modifier::REVERSED),
        );
        let from = self
            .scroll
            .min(lines.len().saturating_sub(usize::from(body.height)));
        for (row, line) in body.rows().zip(lines.iter().skip(from)) {
            let figures = columns
                .iter()
                .map(|column| format!(" {:>1$}", column.text(&line.row), column.width));
            let text = format!(
                "{:name_width$}{}",
                line.name_in(name_width),
                figures.collect::<String>()
            );
            put(row, &text, self.style(&line.row));
        }
    }

    fn style(&self, row: &Row) -> Style {
        let style = match (&row.peer, &row.rail) {
            (None, None) => Style::new().add_modifier(Modifier::BOLD),
            _ => Style::new(),
        };
        match row.condition {
            Condition::Lost if self.has_colours => style.fg(Color::Red),
            Condition::Slow if self.has_colours => style.fg(Color::Yellow),
            _ => style,
        }
    }

    fn title(&self) -> String {
        let jobs = self
            .snapshot
            .as_ref()
            .map_or(0, |snapshot| snapshot.jobs.len());
        let paused = if self.is_paused { ", PAUSED" } else { "" };
        format!(
            "nccl-spark top: {}, every {} s, by {}{paused}",
            count(jobs, "job"),
            self.interval.as_secs_f64(),
            self.order.name()
        )
    }

    /// Returns the first of the remarks ([`lines::remarks`]: ports with errors, processes that are
    /// not shown) and the number of the others. Without a remark, returns the list of keys.
    fn footer(&self) -> String {
        let remarks = self
            .snapshot
            .as_ref()
            .map(lines::remarks)
            .unwrap_or_default();
        match remarks.as_slice() {
            [] => "q end  p pause  s order  d peers  ? help".to_owned(),
            [only] => only.clone(),
            [first, more @ ..] => format!("{first} (and {})", count(more.len(), "more message")),
        }
    }

    fn lines(&self) -> Vec<Line> {
        let Some(snapshot) = &self.snapshot else {
            return Vec::new();
        };
        let mut jobs = rows::of_snapshot(snapshot, self.by_peer);
        self.order.sort(&mut jobs);
        let lines = jobs.into_iter().flat_map(|(job, rows)| {
            rows.into_iter().map(|row| Line {
                name: name(job, &row),
                row,
            })
        });
        lines.collect()
    }
}

fn name(job: &Job, row: &Row) -> String {
    match (&row.peer, &row.rail) {
        (None, None) => {
            let rank = job
                .seen
                .rank
                .map(|rank| format!(" rank {rank}"))
                .unwrap_or_default();
            format!("{} {}{rank}", job.seen.pid, job.seen.command)
        }
        (Some(name), None) | (None, Some(name)) => format!(" {name}"),
        (Some(_), Some(rail)) => format!("  {rail}"),
    }
}

/// Returns the width of the name, and the figures that fit into a terminal of `width` characters.
/// The longest name of a rail, with its mark, needs `room` characters.
fn columns_for(width: usize, room: usize) -> (usize, Vec<Column>) {
    let mut by_place: Vec<Column> = columns::ALL.to_vec();
    by_place.sort_by_key(|column| column.place);
    let ends = by_place.iter().scan(0, |end, column| {
        *end += column.width + 1;
        Some((column.place, *end))
    });
    let fits = |(place, end): &(usize, usize)| {
        let names = if *place < FIRST_FIGURES {
            LEAST_NAME
        } else {
            room.clamp(LEAST_NAME, MOST_NAME)
        };
        names + end <= width
    };
    let shown = ends.take_while(fits).count();
    let figures: Vec<Column> = columns::ALL
        .into_iter()
        .filter(|column| column.place < shown)
        .collect();
    let taken: usize = figures.iter().map(|column| column.width + 1).sum();
    (width.saturating_sub(taken).min(MOST_NAME), figures)
}

/// Splits the screen into title, heading, table and footer. A terminal of fewer than 5 lines has no
/// footer, of fewer than 4 also no title, and of fewer than 2 also no heading.
fn layout(area: Rect) -> [Rect; 4] {
    let from = |height| Constraint::Length(u16::from(area.height >= height));
    Layout::vertical([from(4), from(2), Constraint::Fill(1), from(5)]).areas(area)
}

#[cfg(test)]
mod tests;

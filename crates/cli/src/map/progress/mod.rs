//! How a run goes, shown while it goes: at a terminal a few lines that are drawn anew, elsewhere a line from time to time.
//! Its thread ends, and the lines at the terminal are wiped, when the run is over.

mod page;
mod rate;

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use gpupool_dispatch::Remote;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::feeder::Total;
use super::limits::{DRAW_EVERY, LINE_EVERY};
use super::say::Say;
use super::tasks::OpenTasks;
use super::ticking::{Over, Ticking};
use crate::terminal::Screen;
pub(super) use page::per_second;
use page::{Page, summary};
use rate::Rates;

/// How progress is shown.
#[derive(Debug, Clone)]
pub(super) enum Style {
    /// Not at all.
    None,
    /// A line from time to time.
    Lines,
    /// Lines that are drawn anew.
    Bars(MultiProgress),
}

impl Style {
    /// What fits where standard error goes.
    pub fn here(is_wanted: bool, may_draw: bool) -> Self {
        let is_dumb = std::env::var_os("TERM").is_none_or(|terminal| terminal == "dumb");
        match (is_wanted, may_draw && std::io::stderr().is_terminal() && !is_dumb) {
            (false, _) => Self::None,
            (true, false) => Self::Lines,
            (true, true) => Self::Bars(MultiProgress::with_draw_target(ProgressDrawTarget::stderr())),
        }
    }

    /// The lines at the terminal, where there are any.
    pub fn bars(&self) -> Option<MultiProgress> {
        match self {
            Self::Bars(bars) => Some(bars.clone()),
            _ => None,
        }
    }
}

/// What is to be shown.
#[derive(Debug, Clone)]
pub(super) struct Shown {
    pub remote: Remote,
    pub tasks: OpenTasks,
    pub total: Total,
    pub waiting: Waiting,
}

/// GPUs that are waited for, by place, and how that goes.
#[derive(Debug, Clone, Default)]
pub(super) struct Waiting(Arc<Mutex<BTreeMap<usize, String>>>);

impl Waiting {
    /// How it goes at this place; nothing, where it is not waited for. Whether that is new.
    pub fn set(&self, place: usize, text: Option<String>) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = waiting.remove(&place);
        let is_new = before != text;
        if let Some(text) = text {
            waiting.insert(place, text);
        }
        is_new
    }

    fn texts(&self) -> Vec<String> {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut texts: Vec<String> = waiting.values().cloned().collect();
        texts.dedup();
        texts
    }
}

/// Shows a run's progress until what this gives is dropped.
pub(super) fn show(style: Style, shown: Shown, say: Say) -> anyhow::Result<Option<Ticking>> {
    let name = "gpupool-progress";
    Ok(match style {
        Style::None => None,
        Style::Lines => Some(Ticking::start(name, move |over| tell(&shown, &say, over))?),
        Style::Bars(bars) => Some(Ticking::start(name, move |over| draw(&shown, &bars, over))?),
    })
}

fn tell(shown: &Shown, say: &Say, over: &Over) {
    let mut rates = Rates::default();
    rates.of("", 0, Instant::now());
    while !over.within(LINE_EVERY) {
        let stats = shown.remote.stats();
        let rate = rates.of("", page::over(&stats), Instant::now());
        say.line(summary(&stats, shown.total.get(), rate));
    }
}

fn draw(shown: &Shown, bars: &MultiProgress, over: &Over) {
    let mut rates = Rates::default();
    // One bar of many lines: with a bar for each, a line could be drawn beside older ones of other widths.
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{msg}") {
        bar.set_style(style);
    }
    let bar = bars.add(bar);
    loop {
        let (stats, waiting) = (shown.remote.stats(), shown.waiting.texts());
        let page = Page { stats: &stats, tasks: &shown.tasks, total: shown.total.get(), waiting: &waiting };
        let (screen, height) = screen();
        let lines = page.lines(&mut rates, Instant::now(), screen, height);
        bar.set_message(lines.join("\n"));
        if over.within(DRAW_EVERY) {
            // Wiped: the last word is the summary's.
            let _ = bars.clear();
            return;
        }
    }
}

/// Where standard error is drawn to. The last column stays free: writing there makes some terminals begin a new line.
fn screen() -> (Screen, usize) {
    let size = rustix::termios::tcgetwinsize(std::io::stderr()).ok();
    let (width, height) = size.map_or((0, 0), |size| (usize::from(size.ws_col), usize::from(size.ws_row)));
    let or = |value, usual| if value == 0 { usual } else { value };
    (Screen { width: Some(or(width, 80) - 1), colours: false }, or(height, 24) - 1)
}

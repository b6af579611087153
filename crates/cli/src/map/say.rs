//! What `gpupool map` says beside its tasks, on standard error, above the progress where there is one.

use std::fmt::Display;

use indicatif::MultiProgress;

use crate::run::say::Voice;

/// Says things.
#[derive(Debug, Clone)]
pub(super) struct Say {
    voice: Voice,
    bars: Option<MultiProgress>,
}

impl Say {
    pub fn new(is_quiet: bool, bars: Option<MultiProgress>) -> Self {
        Self { voice: if is_quiet { Voice::Quiet } else { Voice::Normal }, bars }
    }

    /// Something good to know.
    pub fn note(&self, text: impl Display) {
        self.above(|voice| voice.note(text));
    }

    /// Something that went wrong.
    pub fn warn(&self, text: impl Display) {
        self.above(|voice| voice.warn(text));
    }

    /// What somebody asked to be told.
    pub fn line(&self, text: impl Display) {
        self.warn(text);
    }

    /// Whether progress is drawn below.
    pub fn is_drawn(&self) -> bool {
        self.bars.is_some()
    }

    fn above(&self, say: impl FnOnce(Voice)) {
        match &self.bars {
            Some(bars) => bars.suspend(|| say(self.voice)),
            None => say(self.voice),
        }
    }
}

//! The counters found so far in one answer.

use super::decimal::{Decimal, scaled_up};

/// Longer model names are ignored.
pub const MAX_MODEL_BYTES: usize = 96;

/// The meaning of the value at a wanted path. Formats map the same counter to different parts (see
/// [`super::format`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counter {
    Input,
    Output,
    Total,
    /// Read from a cache. Part of the input or separate, by format.
    Cached,
    /// Written to a cache, or Gemini's tool prompts. Part of the input or separate, by format.
    Extra,
    /// Part of the output or separate, by format.
    Reasoning,
    /// No tokens: seconds, or units of a configured field.
    Units,
    /// No number: the name of the answering model.
    Model,
}

const NUMBERS: usize = Counter::Model as usize;

/// The largest value of each counter, and the first model name. Counters are cumulative within an
/// answer, so order and repetition do not matter.
#[derive(Clone, Debug)]
pub(super) struct UsageCounters {
    told: u8,
    model_bytes: u8,
    model: [u8; MAX_MODEL_BYTES],
    values: [u64; NUMBERS],
}

impl UsageCounters {
    pub(super) fn new() -> UsageCounters {
        UsageCounters {
            told: 0,
            model_bytes: 0,
            model: [0; MAX_MODEL_BYTES],
            values: [0; NUMBERS],
        }
    }

    pub(super) fn record(&mut self, counter: Counter, text: &[u8], scale: Decimal) {
        let place = self.values.get_mut(counter as usize);
        if let (Some(place), Some(value)) = (place, scaled_up(text, scale)) {
            self.told |= 1 << counter as u8;
            *place = value.max(*place);
        }
    }

    /// `None` until a value is found.
    pub(super) fn get(&self, counter: Counter) -> Option<u64> {
        let is_told = self.told & (1 << counter as u8) != 0;
        is_told.then(|| self.values.get(counter as usize).copied())?
    }

    pub(super) fn any(&self) -> bool {
        self.told != 0
    }

    /// Keeps the first name, if it is text of at most [`MAX_MODEL_BYTES`].
    pub(super) fn set_model(&mut self, name: &[u8]) {
        let is_new = self.model_bytes == 0 && std::str::from_utf8(name).is_ok();
        if is_new && let Some(place) = self.model.get_mut(..name.len()) {
            place.copy_from_slice(name);
            self.model_bytes = name.len() as u8;
        }
    }

    pub(super) fn model(&self) -> Option<&str> {
        let name = self.model.get(..usize::from(self.model_bytes))?;
        std::str::from_utf8(name)
            .ok()
            .filter(|name| !name.is_empty())
    }
}

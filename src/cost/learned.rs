//! Ratios learned from each model's answers, per limit: tokens per request byte, output per answer,
//! output per event.
//!
//! Each number is a running mean. Its newest sample weighs 1/n, but at least 1/256, so it follows
//! changes within some hundred answers. Each mean is one atomic word, so workers learn and read
//! without locks. A limit tracks at most [`MAX_MODELS`] models; the others share one entry. Names
//! come from the configuration or from answers below 400, never from a request alone. Nothing is
//! written to disk.

use std::{
    fmt,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Models tracked separately per limit.
pub const MAX_MODELS: usize = 64;

/// Answers until a mean is used.
pub const KNOWN_FROM: u32 = 20;

/// A new sample weighs at least one in this many.
const MEMORY: u32 = 256;

/// Once a mean is known, a sample is capped at this many times the mean.
const MAX_OUTLIER: f32 = 8.0;

/// Minimum events of a stream to learn tokens per event from it.
pub const MIN_EVENTS: u64 = 20;

/// Bounds of κ.
const TOKENS_PER_BYTE: (f32, f32) = (1.0 / 64.0, 1.0);

/// κ before the first answer.
const FIRST_TOKENS_PER_BYTE: f32 = 0.25;

/// Bounds of ρ.
const TOKENS_PER_EVENT: (f32, f32) = (0.25, 256.0);

/// A mean and its number of samples in one word.
struct RunningMean(AtomicU64);

impl RunningMean {
    fn new(first: f32) -> RunningMean {
        RunningMean(AtomicU64::new(RunningMean::pack(first, 0)))
    }

    fn pack(mean: f32, samples: u32) -> u64 {
        (u64::from(mean.to_bits()) << 32) | u64::from(samples)
    }

    fn unpack(word: u64) -> (f32, u32) {
        (f32::from_bits((word >> 32) as u32), word as u32)
    }

    fn get(&self) -> (f32, u32) {
        RunningMean::unpack(self.0.load(Relaxed))
    }

    /// Adds a sample; `bound` may limit it, given the known mean.
    fn learn(&self, sample: f32, bound: impl Fn(f32, f32, u32) -> f32) {
        let next = |word| {
            let (mean, samples) = RunningMean::unpack(word);
            let sample = bound(sample, mean, samples);
            let samples = samples.saturating_add(1);
            let weight = 1.0 / samples.min(MEMORY) as f32;
            let mean = mean + (sample - mean) * weight;
            mean.is_finite().then(|| RunningMean::pack(mean, samples))
        };
        // `None` keeps the old mean.
        _ = self.0.fetch_update(Relaxed, Relaxed, next);
    }
}

impl fmt::Debug for RunningMean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mean, samples) = self.get();
        write!(f, "{mean} of {samples}")
    }
}

/// The means of one model.
#[derive(Debug)]
struct ModelMeans {
    tokens_per_byte: RunningMean,
    output: RunningMean,
    tokens_per_event: RunningMean,
}

/// The ratios used in an estimate for one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelRatios {
    /// κ: input tokens per byte of a request's body.
    pub tokens_per_byte: f32,
    /// μ: output tokens per choice. The first assumption, until [`KNOWN_FROM`] answers are seen.
    pub output: f32,
    /// ρ: output tokens per event; `None` while unknown.
    pub tokens_per_event: Option<f32>,
    /// Number of answers behind μ.
    pub answers: u32,
}

/// Assumptions about a model before its answers are known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstRatios {
    /// Output tokens per answer.
    pub output: u64,
    /// Output tokens per event. If `None`, streams do not grow until this is learned.
    pub tokens_per_event: Option<u32>,
}

/// An answer to learn from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerSample {
    /// Counted bytes of the request body.
    pub request_bytes: u64,
    /// Reported input tokens; 0 if none.
    pub input: u64,
    /// Reported output tokens; `None` if the answer was aborted.
    pub output: Option<u64>,
    /// Choices that the request asked for.
    pub choices: u64,
    /// Events of the stream; 0 if the answer is not a stream.
    pub events: u64,
}

/// The ratios learned by one limit. They survive reloads, by the limit's name.
#[derive(Debug)]
pub struct LearnedRatios {
    models: [OnceLock<(Box<str>, ModelMeans)>; MAX_MODELS],
    other: ModelMeans,
    /// Upper bound of μ.
    max_output: u64,
}

impl LearnedRatios {
    /// Knows nothing yet but the names in a price table. `max_output` bounds the mean output.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>, max_output: u64) -> LearnedRatios {
        let learned = LearnedRatios {
            models: [const { OnceLock::new() }; MAX_MODELS],
            other: ModelMeans::new(),
            max_output,
        };
        for name in names {
            learned.take_in(name);
        }
        learned
    }

    /// Adds a model if there is room. Call it only for models of answers below 400.
    pub fn take_in(&self, name: &str) {
        if name.len() > super::counters::MAX_MODEL_BYTES {
            return;
        }
        for place in &self.models {
            let mut is_new = false;
            let (known, _) = place.get_or_init(|| {
                is_new = true;
                (name.into(), ModelMeans::new())
            });
            if is_new || **known == *name {
                return;
            }
        }
    }

    /// The ratios for an estimate.
    pub fn ratios(&self, model: Option<&str>, first: &FirstRatios) -> ModelRatios {
        let means = self.means(model);
        let (tokens_per_byte, _) = means.tokens_per_byte.get();
        let (output, answers) = means.output.get();
        let (tokens_per_event, streams) = means.tokens_per_event.get();
        ModelRatios {
            tokens_per_byte: within(tokens_per_byte, TOKENS_PER_BYTE),
            output: match answers >= KNOWN_FROM {
                true => output,
                false => first.output as f32,
            },
            tokens_per_event: match (first.tokens_per_event, streams) {
                (Some(first), 0) => Some(first as f32),
                (None, streams) if streams < KNOWN_FROM => None,
                _ => Some(within(tokens_per_event, TOKENS_PER_EVENT)),
            },
            answers,
        }
    }

    /// Learns from an answer below 400 that reported its usage.
    pub fn learn(&self, model: Option<&str>, sample: &AnswerSample) {
        let means = self.means(model);
        if sample.input > 0 && sample.request_bytes > 0 {
            let ratio = sample.input as f32 / sample.request_bytes as f32;
            means
                .tokens_per_byte
                .learn(ratio, |ratio, _, _| within(ratio, TOKENS_PER_BYTE));
        }
        let Some(output) = sample.output else { return };
        let most = self.max_output as f32;
        let per_choice = output as f32 / sample.choices.max(1) as f32;
        means.output.learn(per_choice, |output, mean, answers| {
            let most = match answers >= KNOWN_FROM {
                true => most.min(mean * MAX_OUTLIER),
                false => most,
            };
            output.min(most)
        });
        if sample.events >= MIN_EVENTS && output > 0 {
            let ratio = output as f32 / sample.events as f32;
            means
                .tokens_per_event
                .learn(ratio, |ratio, _, _| within(ratio, TOKENS_PER_EVENT));
        }
    }

    fn means(&self, model: Option<&str>) -> &ModelMeans {
        let known = model.and_then(|model| {
            let mut models = self.models.iter().map_while(OnceLock::get);
            models.find(|(name, _)| **name == *model)
        });
        known.map_or(&self.other, |(_, means)| means)
    }
}

impl ModelMeans {
    fn new() -> ModelMeans {
        ModelMeans {
            tokens_per_byte: RunningMean::new(FIRST_TOKENS_PER_BYTE),
            output: RunningMean::new(0.0),
            tokens_per_event: RunningMean::new(0.0),
        }
    }
}

fn within(value: f32, (least, most): (f32, f32)) -> f32 {
    value.clamp(least, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: FirstRatios = FirstRatios {
        output: 1_000,
        tokens_per_event: Some(1),
    };

    fn answer(output: u64, events: u64) -> AnswerSample {
        AnswerSample {
            request_bytes: 400,
            input: 100,
            output: Some(output),
            choices: 1,
            events,
        }
    }

    fn learned() -> LearnedRatios {
        LearnedRatios::new(["m"], 1_000_000_000)
    }

    #[test]
    fn nothing_is_known_at_first() {
        let ratios = learned().ratios(Some("m"), &FIRST);
        assert_eq!(ratios.tokens_per_byte, 0.25);
        assert_eq!((ratios.output, ratios.answers), (1_000.0, 0));
        assert_eq!(ratios.tokens_per_event, Some(1.0));
    }

    #[test]
    fn the_mean_of_outputs_counts_from_the_twentieth_answer_on() {
        let learned = learned();
        for _ in 0..19 {
            learned.learn(Some("m"), &answer(5_000, 0));
        }
        assert_eq!(learned.ratios(Some("m"), &FIRST).output, 1_000.0);
        learned.learn(Some("m"), &answer(5_000, 0));
        let ratios = learned.ratios(Some("m"), &FIRST);
        assert!((ratios.output - 5_000.0).abs() < 1.0, "{ratios:?}");
        assert_eq!(
            learned.ratios(None, &FIRST).answers,
            0,
            "others know nothing of it"
        );
    }

    #[test]
    fn one_huge_answer_counts_as_eight_means() {
        let learned = learned();
        for _ in 0..100 {
            learned.learn(None, &answer(1_000, 0));
        }
        learned.learn(None, &answer(1_000_000_000, 0));
        let output = learned.ratios(None, &FIRST).output;
        assert!((1_000.0..1_080.0).contains(&output), "{output}");
    }

    #[test]
    fn twenty_streams_of_three_tokens_per_event_are_known_within_five_percent() {
        let learned = learned();
        learned.learn(None, &answer(38, 19));
        assert_eq!(
            learned.ratios(None, &FIRST).tokens_per_event,
            Some(1.0),
            "too short"
        );
        let unknown = FirstRatios {
            tokens_per_event: None,
            ..FIRST
        };
        for streams in 1..=20 {
            learned.learn(None, &answer(300, 100));
            let known = learned.ratios(None, &unknown).tokens_per_event;
            assert_eq!(known.is_some(), streams >= 20);
        }
        let ratio = learned
            .ratios(None, &FIRST)
            .tokens_per_event
            .expect("it is known");
        assert!((2.85..3.15).contains(&ratio), "{ratio}");
    }

    #[test]
    fn an_aborted_answer_teaches_only_its_input() {
        let learned = learned();
        let aborted = AnswerSample {
            output: None,
            input: 200,
            ..answer(0, 100)
        };
        learned.learn(None, &aborted);
        let ratios = learned.ratios(None, &FIRST);
        assert_eq!((ratios.tokens_per_byte, ratios.answers), (0.5, 0));
    }

    #[test]
    fn ratios_stay_within_their_bounds_and_choices_are_divided_out() {
        let learned = learned();
        let odd = AnswerSample {
            input: u64::MAX,
            request_bytes: 1,
            output: Some(u64::MAX),
            choices: 4,
            events: 20,
        };
        for _ in 0..40 {
            learned.learn(None, &odd);
        }
        let ratios = learned.ratios(None, &FIRST);
        assert_eq!(
            (ratios.tokens_per_byte, ratios.tokens_per_event),
            (1.0, Some(256.0))
        );
        assert!(ratios.output <= 1.0e9, "{ratios:?}");
        let learned = LearnedRatios::new([], 1_000_000_000);
        for _ in 0..20 {
            learned.learn(
                None,
                &AnswerSample {
                    choices: 4,
                    ..answer(400, 0)
                },
            );
        }
        assert_eq!(learned.ratios(None, &FIRST).output, 100.0);
    }

    #[test]
    fn a_change_is_followed_within_some_hundred_answers() {
        let learned = learned();
        for _ in 0..10_000 {
            learned.learn(None, &answer(100, 0));
        }
        for _ in 0..600 {
            learned.learn(None, &answer(500, 0));
        }
        let output = learned.ratios(None, &FIRST).output;
        assert!((450.0..=500.0).contains(&output), "{output}");
    }

    #[test]
    fn sixty_four_models_are_told_apart_and_the_others_share() {
        let learned = LearnedRatios::new([], 1_000_000_000);
        for model in 0..100_000 {
            learned.take_in(&format!("model {model}"));
        }
        learned.learn(Some("model 63"), &answer(7, 0));
        learned.learn(Some("model 64"), &answer(7, 0));
        assert_eq!(learned.ratios(Some("model 63"), &FIRST).answers, 1);
        assert_eq!(
            learned.ratios(Some("model 99999"), &FIRST).answers,
            1,
            "shared"
        );
        assert_eq!(learned.ratios(Some("model 0"), &FIRST).answers, 0);
    }

    #[test]
    fn workers_learn_at_once() {
        let learned = LearnedRatios::new([], 1_000_000_000);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..1_000 {
                        learned.take_in("m");
                        learned.learn(Some("m"), &answer(300, 100));
                    }
                });
            }
        });
        let ratios = learned.ratios(Some("m"), &FIRST);
        assert_eq!((ratios.answers, ratios.output), (8_000, 300.0));
    }
}

//! Overload protection: bounds the requests in flight over all routes, and sheds low priorities
//! first.
//!
//! Beyond the upstreams' capacity, more requests in flight only add waiting time for every client.
//! So the number is bounded, and a share of it is reserved for higher priorities. Shedding happens
//! before the limits, so a shed request spends none of its client's quota.
//!
//! **Adaptive.** The bound follows the upstreams' response time, using the gradient algorithm of
//! Netflix's concurrency-limits. Twice a second the average is compared with the best known
//! average. Up to twice the best plus ten milliseconds counts as noise. Beyond that the bound
//! shrinks in proportion, at most by half. While the bound is used and nothing slows down, it grows
//! by its square root. The best average is forgotten slowly (0.1 % per step), so the bound recovers
//! if a service becomes slower permanently.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Settings of `[overload]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverloadSettings {
    /// The bound on requests in flight.
    pub bound: InFlightBound,
    /// Share of the bound, in millionths, that only critical requests may use.
    pub critical_ppm: u32,
    /// Additional share, in millionths, that low-priority requests may not use.
    pub normal_ppm: u32,
    /// The minimum of an adaptive bound.
    pub floor: usize,
}

/// The bound on requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InFlightBound {
    /// A fixed number of requests.
    Fixed(usize),
    /// As many requests as upstreams answer without slowing down.
    Adaptive,
}

/// Shedding priority; `Low` is shed first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Shed last; may use the whole bound.
    Critical,
    /// Shed before `Critical`.
    #[default]
    Normal,
    /// Shed first.
    Low,
}

impl Priority {
    /// The name, unless it is the default priority.
    pub fn stated(self) -> Option<&'static str> {
        (self != Priority::Normal).then_some(self.as_str())
    }

    /// All variants, most important first.
    pub const ALL: [Priority; 3] = [Priority::Critical, Priority::Normal, Priority::Low];

    /// The name in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Priority::Critical => "critical",
            Priority::Normal => "normal",
            Priority::Low => "low",
        }
    }
}

/// The initial adaptive bound, and the maximum of any bound.
const FIRST: usize = 100;
const MOST: usize = 1_000_000;
/// Minimum time and minimum number of responses between two steps of an adaptive bound.
const STEP: Duration = Duration::from_millis(500);
const ANSWERS: u64 = 10;

/// The requests in flight and their bound. Shared by all workers.
#[derive(Debug)]
pub struct Overload {
    settings: OverloadSettings,
    bound: AtomicUsize,
    in_flight: AtomicUsize,
    /// `peak`, `answers` and `micros` cover the time since the last step.
    peak: AtomicUsize,
    answers: AtomicU64,
    micros: AtomicU64,
    /// Taken with `try_lock`, so only one thread computes a step and no thread waits.
    control: Mutex<(Instant, Controller)>,
}

impl Overload {
    /// Starts with no requests in flight.
    pub fn new(settings: OverloadSettings) -> Arc<Overload> {
        let bound = match settings.bound {
            InFlightBound::Fixed(bound) => bound,
            InFlightBound::Adaptive => FIRST.max(settings.floor),
        };
        Arc::new(Overload {
            settings,
            bound: bound.into(),
            in_flight: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            answers: AtomicU64::new(0),
            micros: AtomicU64::new(0),
            control: Mutex::new((Instant::now(), Controller::default())),
        })
    }

    /// The configured settings.
    pub fn settings(&self) -> &OverloadSettings {
        &self.settings
    }

    /// Takes a permit that is released on drop; `None` if there is no room for this priority. Costs
    /// two atomic operations.
    pub fn enter(self: &Arc<Self>, priority: Priority) -> Option<OverloadPermit> {
        let room = self.room(priority);
        let before = self.in_flight.fetch_add(1, Relaxed);
        let place = OverloadPermit(Arc::clone(self));
        if before >= room {
            return None;
        }
        if self.settings.bound == InFlightBound::Adaptive {
            self.peak.fetch_max(before + 1, Relaxed);
        }
        Some(place)
    }

    /// Whether one more request of this priority would be admitted now. Takes no permit.
    pub fn has_room(&self, priority: Priority) -> bool {
        self.in_flight.load(Relaxed) < self.room(priority)
    }

    /// The number of requests in flight below which one of this priority is admitted.
    fn room(&self, priority: Priority) -> usize {
        let kept_ppm = match priority {
            Priority::Critical => 0,
            Priority::Normal => self.settings.critical_ppm,
            Priority::Low => self.settings.critical_ppm + self.settings.normal_ppm,
        };
        let bound = self.bound.load(Relaxed);
        let kept = (bound as u128 * u128::from(kept_ppm)).div_ceil(1_000_000);
        bound.saturating_sub(usize::try_from(kept).unwrap_or(usize::MAX))
    }

    /// Reports the time that an upstream took to answer or to fail.
    pub fn answered(&self, took: Duration) {
        if self.settings.bound != InFlightBound::Adaptive {
            return;
        }
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros.max(1), Relaxed);
        let answers = self.answers.fetch_add(1, Relaxed) + 1;
        if answers >= ANSWERS {
            self.step(Instant::now());
        }
    }

    fn step(&self, now: Instant) {
        let Ok(mut control) = self.control.try_lock() else {
            return;
        };
        let (last, controller) = &mut *control;
        if now.saturating_duration_since(*last) < STEP {
            return;
        }
        *last = now;
        let (answers, micros) = (self.answers.swap(0, Relaxed), self.micros.swap(0, Relaxed));
        let peak = self.peak.swap(self.in_flight.load(Relaxed), Relaxed);
        let average = micros as f64 / answers.max(1) as f64;
        let bound = controller.next(self.bound.load(Relaxed), average, peak);
        self.bound
            .store(bound.clamp(self.settings.floor, MOST), Relaxed);
    }

    /// The current bound on requests in flight.
    pub fn bound(&self) -> usize {
        self.bound.load(Relaxed)
    }
}

/// A permit for one request in flight.
#[derive(Debug)]
#[must_use = "the request is no longer counted when this is dropped"]
pub struct OverloadPermit(Arc<Overload>);

impl Drop for OverloadPermit {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// The state of an adaptive bound.
#[derive(Debug, Default)]
struct Controller {
    /// The best known average in microseconds; rises slightly with each step.
    best: Option<f64>,
}

impl Controller {
    /// The next bound, given the step's average response time in microseconds and its peak of
    /// requests in flight.
    fn next(&mut self, bound: usize, average: f64, peak: usize) -> usize {
        const TOLERATED: f64 = 2.0;
        /// Such a delay is not noticeable, and response times of microseconds vary far more than
        /// twofold.
        const UNNOTICED_MICROS: f64 = 10_000.0;
        const FORGOTTEN: f64 = 1.001;
        let best = self
            .best
            .map_or(average, |best| average.min(best * FORGOTTEN));
        self.best = Some(best);
        let tolerated = TOLERATED * best + UNNOTICED_MICROS;
        let gradient = (tolerated / average).clamp(0.5, 1.0);
        let whole = bound as f64;
        if gradient < 1.0 {
            // shrink from the peak, because an unreached bound carries no information
            return (whole.min(peak as f64) * gradient).ceil() as usize;
        }
        match peak * 2 >= bound {
            true => (whole + whole.sqrt()).ceil() as usize,
            false => bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overload(bound: InFlightBound) -> Arc<Overload> {
        Overload::new(OverloadSettings {
            bound,
            critical_ppm: 200_000,
            normal_ppm: 300_000,
            floor: 10,
        })
    }

    #[test]
    fn who_matters_less_is_shed_first_and_a_place_comes_back() {
        let overload = overload(InFlightBound::Fixed(10));
        let take = |priority, count: usize| -> Vec<OverloadPermit> {
            (0..count).map_while(|_| overload.enter(priority)).collect()
        };
        let low = take(Priority::Low, 20);
        assert_eq!(low.len(), 5, "half is reserved for higher priorities");
        let normal = take(Priority::Normal, 20);
        assert_eq!(normal.len(), 3, "a fifth is reserved for critical requests");
        let critical = take(Priority::Critical, 20);
        assert_eq!(critical.len(), 2, "they may use the whole bound");
        drop(critical);
        assert!(overload.enter(Priority::Normal).is_none());
        assert!(overload.enter(Priority::Critical).is_some());
        drop((low, normal));
        assert_eq!(overload.in_flight.load(Relaxed), 0);
        assert_eq!(take(Priority::Low, 20).len(), 5);
    }

    #[test]
    fn the_bound_grows_while_it_is_used_and_nothing_slows_down() {
        let mut controller = Controller::default();
        assert_eq!(controller.next(100, 5_000.0, 100), 110);
        assert_eq!(controller.next(100, 9_000.0, 60), 110, "noise");
        assert_eq!(
            controller.next(100, 5_000.0, 10),
            100,
            "the bound is not used"
        );
    }

    #[test]
    fn the_bound_shrinks_in_proportion_to_the_delay_and_recovers() {
        let mut controller = Controller::default();
        controller.next(100, 50_000.0, 100);
        let slower = controller.next(100, 165_000.0, 100);
        assert!((65..=70).contains(&slower), "two thirds: {slower}");
        assert_eq!(
            controller.next(100, 5_000_000.0, 100),
            50,
            "at most by half"
        );
        assert_eq!(
            controller.next(1_000, 5_000_000.0, 30),
            15,
            "half of the peak"
        );
        assert!(controller.next(50, 60_000.0, 50) > 50);
    }

    #[test]
    fn what_nobody_notices_is_no_overload() {
        let mut controller = Controller::default();
        controller.next(100, 40.0, 100);
        assert_eq!(controller.next(100, 5_000.0, 100), 110);
    }

    #[test]
    fn a_service_that_is_slower_for_good_is_not_strangled() {
        let mut controller = Controller::default();
        controller.next(100, 100_000.0, 100);
        let mut bound = 100;
        for _ in 0..3_000 {
            bound = controller.next(bound, 1_000_000.0, bound).max(10);
        }
        assert!(bound > 100, "{bound}");
    }

    #[test]
    fn a_step_needs_answers_and_time() {
        let overload = overload(InFlightBound::Adaptive);
        let places: Vec<_> = (0..60)
            .filter_map(|_| overload.enter(Priority::Critical))
            .collect();
        for _ in 0..100 {
            overload.answered(Duration::from_millis(5));
        }
        assert_eq!(overload.bound(), FIRST, "half a second has not passed");
        overload.step(Instant::now() + STEP);
        assert_eq!(overload.bound(), 110);
        for _ in 0..100 {
            overload.answered(Duration::from_secs(5));
        }
        overload.step(Instant::now() + 2 * STEP);
        assert_eq!(overload.bound(), 30, "half of the sixty in flight");
        drop(places);
    }
}

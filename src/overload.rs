//! Overload: how many requests may be under way at once, over all routes, and who is shed first.
//!
//! Beyond what upstreams can do at the same time, more requests only wait longer: every client is served late instead of some
//! being told to come back. So there is a bound, and a share of it is kept from those that matter less. What is shed costs its
//! client nothing: it comes before the limits.
//!
//! **Adaptive.** The bound follows the time that upstreams take to answer, by the gradient of Netflix' concurrency-limits: twice a
//! second the average is compared with the best one that is known. Up to twice as long, and ten milliseconds, is taken for noise; beyond that the
//! bound shrinks in proportion, at most by half. While it is in use and nothing slows down, it grows by its square root. The best
//! average is forgotten slowly (a tenth of a percent a step), so that a service that has become slower for good is not strangled.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// `[overload]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How many requests may be under way.
    pub bound: Bound,
    /// Millionths of it that only critical requests may use.
    pub critical_ppm: u32,
    /// Millionths of it, besides, that low ones may not use.
    pub normal_ppm: u32,
    /// An adaptive bound is never less.
    pub floor: usize,
}

/// How many requests may be under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// So many.
    Fixed(usize),
    /// As many as upstreams answer without becoming slower.
    Adaptive,
}

/// Who is shed last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Last.
    Critical,
    /// Before.
    #[default]
    Normal,
    /// First.
    Low,
}

impl Priority {
    /// Its name, where it is not the usual one.
    pub fn stated(self) -> Option<&'static str> {
        (self != Priority::Normal).then_some(self.as_str())
    }

    /// All of them, the most important first.
    pub const ALL: [Priority; 3] = [Priority::Critical, Priority::Normal, Priority::Low];

    /// As in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Priority::Critical => "critical",
            Priority::Normal => "normal",
            Priority::Low => "low",
        }
    }
}

/// An adaptive bound begins here, and no bound is higher than the most.
const FIRST: usize = 100;
const MOST: usize = 1_000_000;
/// How often an adaptive bound moves, and of how many answers at least.
const STEP: Duration = Duration::from_millis(500);
const ANSWERS: u64 = 10;

/// The requests that are under way, and how many may be. Shared by all workers.
#[derive(Debug)]
pub struct Overload {
    settings: Settings,
    bound: AtomicUsize,
    in_flight: AtomicUsize,
    /// Since the last step.
    peak: AtomicUsize,
    answers: AtomicU64,
    micros: AtomicU64,
    /// Locked for a step, and where it is locked nobody waits.
    control: Mutex<(Instant, Controller)>,
}

impl Overload {
    /// With nothing under way.
    pub fn new(settings: Settings) -> Arc<Overload> {
        let bound = match settings.bound {
            Bound::Fixed(bound) => bound,
            Bound::Adaptive => FIRST.max(settings.floor),
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

    /// As configured.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// A place among the requests that are under way, until it is dropped; `None` where there is none for this priority. Two
    /// atomic operations.
    pub fn enter(self: &Arc<Self>, priority: Priority) -> Option<Place> {
        let room = self.room(priority);
        let before = self.in_flight.fetch_add(1, Relaxed);
        let place = Place(Arc::clone(self));
        if before >= room {
            return None;
        }
        if self.settings.bound == Bound::Adaptive {
            self.peak.fetch_max(before + 1, Relaxed);
        }
        Some(place)
    }

    /// Whether one more request of this priority would find a place now. Takes none.
    pub fn has_room(&self, priority: Priority) -> bool {
        self.in_flight.load(Relaxed) < self.room(priority)
    }

    /// How many requests there may be for one more of this priority.
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

    /// An upstream has taken so long to answer, or not to.
    pub fn answered(&self, took: Duration) {
        if self.settings.bound != Bound::Adaptive {
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

    /// How many requests may be under way now.
    pub fn bound(&self) -> usize {
        self.bound.load(Relaxed)
    }
}

/// One request among those that are under way.
#[derive(Debug)]
#[must_use = "the request is no longer counted when this is dropped"]
pub struct Place(Arc<Overload>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// What an adaptive bound remembers.
#[derive(Debug, Default)]
struct Controller {
    /// The best average that is known, in microseconds, and a little more with each step.
    best: Option<f64>,
}

impl Controller {
    /// The next bound, after a step in which answers took `average` microseconds, and as many as `peak` were under way.
    fn next(&mut self, bound: usize, average: f64, peak: usize) -> usize {
        const TOLERATED: f64 = 2.0;
        /// Nobody notices so little, and what answers within microseconds varies by far more than twice.
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
            // from what was used: a bound that nobody reaches says nothing
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

    fn overload(bound: Bound) -> Arc<Overload> {
        Overload::new(Settings {
            bound,
            critical_ppm: 200_000,
            normal_ppm: 300_000,
            floor: 10,
        })
    }

    #[test]
    fn who_matters_less_is_shed_first_and_a_place_comes_back() {
        let overload = overload(Bound::Fixed(10));
        let take = |priority, count: usize| -> Vec<Place> {
            (0..count).map_while(|_| overload.enter(priority)).collect()
        };
        let low = take(Priority::Low, 20);
        assert_eq!(low.len(), 5, "half is kept from them");
        let normal = take(Priority::Normal, 20);
        assert_eq!(normal.len(), 3, "a fifth is kept from them");
        let critical = take(Priority::Critical, 20);
        assert_eq!(critical.len(), 2, "all of it is theirs");
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
        assert_eq!(controller.next(100, 5_000.0, 10), 100, "nobody needs more");
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
            "of what was used"
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
        let overload = overload(Bound::Adaptive);
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
        assert_eq!(
            overload.bound(),
            30,
            "half of the sixty that were under way"
        );
        drop(places);
    }
}

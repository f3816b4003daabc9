//! Requests that arrive at random moments (Poisson) at several gateways, and the outcome of each. A
//! run sends the same requests whatever answers them.

use std::{cell::RefCell, ops::Range, rc::Rc, thread, time::Duration};

use tidegate::budget::RedisTarget;
use tokio::{runtime::LocalOptions, time::Instant};

use crate::{
    gateway::{Answer, Decision, Gateway, Limit},
    support::wait::time_passes,
};

/// Gateways that share keys.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub gateways: usize,
    pub keys: u64,
    pub limit: Limit,
    /// Demand as a multiple of the limit, over all gateways.
    pub load: f64,
    pub seconds: u64,
    /// This many gateways die at once, and others replace them.
    pub deaths: Option<(usize, Duration)>,
}

/// One request; times are relative to the start of the run.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub key: u64,
    pub came: f64,
    pub answered: f64,
    pub decision: Decision,
}

/// The outcome of all requests.
#[derive(Default)]
pub struct Told {
    pub requests: Vec<Request>,
    /// The worst delay in waking up a client, caused by the machine.
    pub late: f64,
}

impl Run {
    /// Runs the load while `befalls` applies a fault to Redis; `befalls` receives the start time.
    pub fn go(self, target: &RedisTarget, befalls: impl FnOnce(Instant)) -> Told {
        let gateways: Vec<Gateway> = (0..self.gateways)
            .map(|_| Gateway::start(target, self.limit))
            .collect();
        let begun = Instant::now();
        let running: Vec<_> = (1..)
            .zip(gateways)
            .map(|(number, gateway)| {
                let target = target.clone();
                thread::spawn(move || self.client(&target, gateway, number, begun))
            })
            .collect();
        befalls(begun);
        let mut all = Told::default();
        for client in running {
            let told = client.join().expect("a client");
            all.requests.extend(told.requests);
            all.late = all.late.max(told.late);
        }
        all
    }

    /// The clients of one gateway.
    fn client(self, target: &RedisTarget, gateway: Gateway, number: usize, begun: Instant) -> Told {
        let rate = self.load * self.limit.rate() * self.keys as f64 / self.gateways as f64;
        let mut arrivals = Arrivals::new(number as u64, rate, self.keys);
        let mut told = Told::default();
        let end = self.seconds as f64;
        let death = self.deaths.filter(|&(dying, _)| number <= dying);
        let Some((_, when)) = death else {
            let gateway = self.until(&mut arrivals, gateway, begun, end, &mut told);
            gateway.close();
            return told;
        };
        let when = when.as_secs_f64();
        // dropped without returning anything, as SIGKILL would end it
        drop(self.until(&mut arrivals, gateway, begun, when, &mut told));
        let next = Gateway::start(target, self.limit);
        self.until(&mut arrivals, next, begun, end, &mut told)
            .close();
        told
    }

    fn until(
        self,
        arrivals: &mut Arrivals,
        gateway: Gateway,
        begun: Instant,
        end: f64,
        told: &mut Told,
    ) -> Gateway {
        let gateway = Rc::new(gateway);
        let all = Rc::new(RefCell::new(std::mem::take(&mut told.requests)));
        runtime().block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            while arrivals.next < end {
                let due = begun + Duration::from_secs_f64(arrivals.next);
                tokio::time::sleep_until(due).await;
                let now = begun.elapsed().as_secs_f64();
                told.late = told.late.max(now - arrivals.next);
                for key in arrivals.until(now.min(end)) {
                    let (gateway, all) = (Rc::clone(&gateway), Rc::clone(&all));
                    tasks.spawn_local(async move {
                        let came = begun.elapsed().as_secs_f64();
                        let decision = gateway.decide(key).await;
                        all.borrow_mut().push(Request {
                            key,
                            came,
                            answered: begun.elapsed().as_secs_f64(),
                            decision,
                        });
                    });
                }
                while tasks.try_join_next().is_some() {}
            }
            while tasks.join_next().await.is_some() {}
        });
        told.requests = all.take();
        Rc::into_inner(gateway).expect("every request has been answered")
    }
}

/// When requests arrive, and for which keys.
struct Arrivals {
    random: u64,
    rate: f64,
    keys: u64,
    next: f64,
}

impl Arrivals {
    fn new(seed: u64, rate: f64, keys: u64) -> Arrivals {
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut arrivals = Arrivals {
            random,
            rate,
            keys,
            next: 0.0,
        };
        arrivals.next = arrivals.gap();
        arrivals
    }

    /// xorshift64*
    fn random(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }

    fn gap(&mut self) -> f64 {
        let part = (self.random() + 1) as f64 / (1_u64 << 53) as f64;
        -part.ln() / self.rate
    }

    /// The keys of the requests that arrived until now.
    fn until(&mut self, now: f64) -> Vec<u64> {
        let mut keys = Vec::new();
        while self.next <= now {
            keys.push(self.random() % self.keys + 1);
            self.next += self.gap();
        }
        keys
    }
}

impl Told {
    pub fn asked(&self) -> f64 {
        self.requests.len() as f64
    }

    pub fn count(&self, answer: Answer) -> f64 {
        let same = |request: &&Request| request.decision.answer == answer;
        self.requests.iter().filter(same).count() as f64
    }

    pub fn admitted(&self) -> f64 {
        self.count(Answer::Admitted)
    }

    /// Requests admitted with their answer within this period.
    pub fn admitted_within(&self, when: Range<f64>) -> f64 {
        let within = |request: &&Request| {
            request.decision.answer == Answer::Admitted && when.contains(&request.answered)
        };
        self.requests.iter().filter(within).count() as f64
    }

    pub fn waited(&self) -> f64 {
        self.requests
            .iter()
            .filter(|request| request.decision.waited)
            .count() as f64
    }

    /// How many were decided without Redis.
    pub fn alone(&self) -> f64 {
        let alone = self
            .requests
            .iter()
            .filter(|request| request.decision.alone);
        alone.count() as f64
    }

    /// The longest wait of any request, and the 99.9th percentile of those that waited, in seconds.
    pub fn waits(&self) -> (f64, f64) {
        let waited = self
            .requests
            .iter()
            .filter(|request| request.decision.waited);
        let mut waits: Vec<f64> = waited
            .map(|request| request.answered - request.came)
            .collect();
        waits.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| {
            let last = waits.len().saturating_sub(1);
            waits.get((last as f64 * part) as usize).copied()
        };
        (at(1.0).unwrap_or(0.0), at(0.999).unwrap_or(0.0))
    }

    /// Requests that one bucket per key would have admitted at the same times of arrival.
    pub fn exact(&self, limit: &Limit, when: Range<f64>) -> f64 {
        let mut exact = 0.0;
        in_order(
            &self.requests,
            |request| request.came,
            limit,
            |level, request| {
                let admits = *level >= 1.0;
                if admits {
                    *level -= 1.0;
                    exact += f64::from(u8::from(when.contains(&request.came)));
                }
            },
        );
        exact
    }

    /// How many admitted requests do not fit one bucket per key that sees them in order. Decisions
    /// precede their answers by the travel time of the reply and the scheduling delay, so 20 ms and
    /// one token are forgiven.
    pub fn beyond(&self, limit: &Limit, when: Range<f64>) -> f64 {
        let mut beyond = 0.0;
        let least = -(1.0 + 0.02 * limit.rate());
        in_order(
            &self.requests,
            |request| request.answered,
            limit,
            |level, request| {
                if request.decision.answer != Answer::Admitted {
                } else if *level - 1.0 < least {
                    beyond += f64::from(u8::from(when.contains(&request.answered)));
                } else {
                    *level -= 1.0;
                }
            },
        );
        beyond
    }

    /// The largest overdraft of a bucket charged with everything, with the same tolerance; as a
    /// share of the burst.
    pub fn excess(&self, limit: &Limit) -> f64 {
        let mut worst: f64 = 0.0;
        let forgiven = 1.0 + 0.02 * limit.rate();
        in_order(
            &self.requests,
            |request| request.answered,
            limit,
            |level, request| {
                if request.decision.answer == Answer::Admitted {
                    *level -= 1.0;
                    worst = worst.max(-*level - forgiven);
                }
            },
        );
        worst / limit.burst as f64
    }
}

/// Feeds requests to one bucket per key, ordered by one of their moments.
fn in_order(
    requests: &[Request],
    moment: impl Fn(&Request) -> f64,
    limit: &Limit,
    mut show: impl FnMut(&mut f64, &Request),
) {
    let mut sorted: Vec<&Request> = requests.iter().collect();
    sorted.sort_unstable_by(|one, other| {
        let by_time = moment(one).total_cmp(&moment(other));
        one.key.cmp(&other.key).then(by_time)
    });
    let (mut key, mut level, mut at) = (0, 0.0, 0.0);
    for request in sorted {
        let now = moment(request);
        if request.key != key {
            (key, level, at) = (request.key, limit.burst as f64, now);
        }
        level = f64::min(level + (now - at) * limit.rate(), limit.burst as f64);
        at = now;
        show(&mut level, request);
    }
}

/// Waits until this long after the start of the run.
pub fn until(begun: Instant, seconds: f64) {
    let ahead = Duration::from_secs_f64(seconds).saturating_sub(begun.elapsed());
    time_passes(ahead, "the moment comes");
}

fn runtime() -> tokio::runtime::LocalRuntime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build_local(LocalOptions::default())
        .expect("a runtime")
}

//! Another configuration for a process that runs: all of it, or nothing.
//!
//! ```text
//! read and check ─▶ bind new addresses ─▶ attach limits ─▶ hand it to every worker ─▶ it runs
//!        └──────────────────┴──────────────────┴─▶ the configuration that runs stays, loudly
//! ```
//!
//! Until the workers are told, nothing has changed: new sockets are only bound, counters only looked up. From then on nothing
//! can fail. Each worker takes the configuration up between two requests; the answer to whoever asked is given when all have.

use std::{
    fmt::Display,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{Semaphore, mpsc, oneshot},
    time::Instant,
};

use super::{
    aside::{aside, give_memory_back},
    certificates::Certificates,
    descriptors,
    errands::{self, UnderWay},
    notify,
    worker::{Assigned, Opening, Order},
};
use crate::{
    admin::{Reload, Reloaded},
    config::{self, Changes, Loaded, Report, Snapshot},
    gateway::{Current, Shared},
    listener::{self, Address, Bound, Company, Tls},
};

/// What a reload needs to know of the process. Reloads are done one after the other.
pub(super) struct Reloader {
    /// `None` where the gateway was started without a file.
    pub(super) file: Option<PathBuf>,
    pub(super) current: Arc<Current>,
    /// In the order of the running configuration.
    pub(super) listening: Vec<Listening>,
    /// One for each worker.
    pub(super) orders: Vec<mpsc::Sender<Order>>,
    pub(super) connections: Arc<Semaphore>,
    pub(super) errands: UnderWay,
}

/// A listener that is open.
#[derive(Clone, Debug)]
pub(super) struct Listening {
    /// As in the configuration; port 0 is any.
    pub(super) configured: Address,
    /// Where it really is.
    pub(super) real: Address,
    /// Where connections begin with TLS.
    pub(super) tls: Option<Arc<Tls>>,
}

/// A listener of the next configuration: kept, by its place in the running one, or newly bound.
enum Place {
    Kept(usize),
    New(Bound),
}

/// Longer than any request keeps a worker from looking into its mailbox.
const ADOPTION: Duration = Duration::from_secs(10);

impl Reloader {
    /// Answers whoever asks for a reload, for as long as the process runs.
    pub(super) async fn serve(mut self, mut asked: mpsc::Receiver<Reload>) {
        while let Some(Reload { why, answer }) = asked.recv().await {
            notify::tell(notify::RELOADING);
            let result = self.reload(&why).await;
            notify::tell(notify::READY);
            if let Err(report) = &result {
                self.complain(&why, report);
            }
            // whoever asked may have left
            let _ = answer.send(result);
        }
    }

    async fn reload(&mut self, why: &str) -> Result<Reloaded, Report> {
        let Some(file) = self.file.clone() else {
            return Err(config::unfit(
                "command line",
                "this gateway was started without a file: there is nothing to read again"
                    .to_owned(),
            ));
        };
        let shown = file.display().to_string();
        let unfit = |error: &dyn Display| config::unfit(&shown, error.to_string());
        let running = Arc::clone(self.current.shared().snapshot());
        let loaded = aside(move || {
            let loaded = config::load(&file)?;
            let changes = Changes::between(&running, &loaded.snapshot);
            Ok((loaded, changes))
        });
        let (loaded, changes) = loaded.await.map_err(|error| unfit(&error))??;
        let Loaded { snapshot, warnings } = loaded;
        let snapshot = Arc::new(snapshot);
        let places = self.places(&snapshot, &shown)?;
        let (before, next) = (self.current.shared(), Arc::clone(&snapshot));
        // Redis may be slow to answer, and signals are waited for on this thread
        let shared = aside(move || before.succeed(next)).await;
        let shared = shared.map_err(|error| unfit(&error))?;
        let shared = Arc::new(shared.map_err(|error| unfit(&error))?);
        let before: Vec<_> = places.iter().map(|place| self.secured(place)).collect();
        let certificates = Certificates::take_up(&snapshot.listeners, &before, shared.metrics());
        let certificates =
            certificates.map_err(|error| config::unfit(&shown, error.to_string()))?;
        let tls: Vec<_> = certificates.listeners().collect();
        let previous = self.current.shared();
        let errands = errands::of(&shared, Some(&previous), certificates).await;
        self.resize(&snapshot);
        shared.take_over(&previous);
        self.hand_over(&shared, places, &tls).await;
        self.errands.replace(errands);
        self.current.replace(Arc::clone(&shared));
        retire(previous, shared);
        let metrics = self.current.shared().metrics().clone();
        metrics.config_loaded(&snapshot.hash, SystemTime::now());
        tracing::info!(
            why,
            hash = snapshot.hash,
            warnings = warnings.warnings(),
            "configuration reloaded: {changes}"
        );
        Ok(Reloaded {
            hash: snapshot.hash.clone(),
            changes,
            warnings,
        })
    }

    /// Where the next configuration listens. An address that is listened on already keeps its socket.
    fn places(&self, snapshot: &Snapshot, file: &str) -> Result<Vec<Place>, Report> {
        let mut kept = vec![false; self.listening.len()];
        let mut places = Vec::with_capacity(snapshot.listeners.len());
        for settings in &snapshot.listeners {
            let same =
                |at: &usize| self.listening[*at].configured == settings.address && !kept[*at];
            if let Some(at) = (0..kept.len()).find(same) {
                kept[at] = true;
                places.push(Place::Kept(at));
                continue;
            }
            let bound = listener::bind(&settings.address, self.orders.len(), Company::Alone);
            let refused = |error| {
                let why = format!("cannot listen on {}: {error}", settings.address);
                config::unfit(file, why)
            };
            places.push(Place::New(bound.map_err(refused)?));
        }
        Ok(places)
    }

    /// The TLS of a place that is kept.
    fn secured(&self, place: &Place) -> Option<Arc<Tls>> {
        match place {
            Place::Kept(at) => self.listening[*at].tls.clone(),
            Place::New(_) => None,
        }
    }

    /// Lets more or fewer connections be open at once; those beyond a lower bound end by themselves.
    fn resize(&self, snapshot: &Snapshot) {
        descriptors::warn_if_few(snapshot.server.max_connections);
        let most = |snapshot: &Snapshot| {
            let most = descriptors::for_connections(snapshot.server.max_connections);
            most.min(Semaphore::MAX_PERMITS)
        };
        let (before, after) = (most(self.current.shared().snapshot()), most(snapshot));
        self.connections.add_permits(after.saturating_sub(before));
        let fewer = u32::try_from(before.saturating_sub(after)).unwrap_or(u32::MAX);
        if fewer > 0 {
            let connections = Arc::clone(&self.connections);
            tokio::spawn(async move {
                if let Ok(gone) = connections.acquire_many_owned(fewer).await {
                    gone.forget();
                }
            });
        }
    }

    /// Tells every worker, and waits until all have taken it up.
    async fn hand_over(
        &mut self,
        shared: &Arc<Shared>,
        mut places: Vec<Place>,
        tls: &[Option<Arc<Tls>>],
    ) {
        let listeners = &shared.snapshot().listeners;
        let mut adopted = Vec::with_capacity(self.orders.len());
        for orders in &self.orders {
            let doors = listeners.iter().zip(&mut places).zip(tls);
            let assigned = doors.filter_map(|((settings, place), tls)| {
                let (settings, tls) = (settings.clone(), tls.clone());
                Some(match place {
                    Place::Kept(at) => Assigned::Kept(*at, settings, tls),
                    Place::New(bound) => Assigned::New(Opening {
                        settings,
                        label: bound.address.to_string(),
                        tls,
                        socket: bound.sockets.pop()?,
                    }),
                })
            });
            let (done, told) = oneshot::channel();
            let order = Order {
                shared: Arc::clone(shared),
                entrances: assigned.collect(),
                done,
            };
            // fails only for a worker that has ended, which the drain tells of
            if orders.send(order).await.is_ok() {
                adopted.push(told);
            }
        }
        let doors = listeners.iter().zip(places).zip(tls);
        let listening = doors.map(|((settings, place), tls)| Listening {
            configured: settings.address.clone(),
            real: match place {
                Place::Kept(at) => self.listening[at].real.clone(),
                Place::New(bound) => bound.address,
            },
            tls: tls.clone(),
        });
        self.listening = listening.collect();
        let all = async {
            for told in adopted {
                let _ = told.await;
            }
        };
        if tokio::time::timeout(ADOPTION, all).await.is_err() {
            tracing::warn!("a worker has not taken up the new configuration yet; it will");
        }
    }

    fn complain(&self, why: &str, report: &Report) {
        self.current.shared().metrics().config_refused();
        for problem in &report.diagnostics {
            let (line, column) = problem
                .place
                .as_ref()
                .map_or((0, 0), |place| (place.line, place.column));
            let (code, file, hint) = (problem.code.as_str(), &problem.file, &problem.hint);
            match problem.severity {
                config::Severity::Error => {
                    tracing::error!(code, file, line, column, hint, "{}", problem.message)
                }
                config::Severity::Warning => {
                    tracing::warn!(code, file, line, column, hint, "{}", problem.message)
                }
            }
        }
        tracing::error!(
            why,
            "configuration NOT reloaded: {}; the one that ran before still runs",
            report.summary()
        );
    }
}

/// Lets go of what only the configuration before needed, once its last request has ended, or has had its time. The rest of it is
/// let go of when that request has ended, but never by its worker, which would be kept from others by it.
fn retire(previous: Arc<Shared>, after: Arc<Shared>) {
    const LOOK: Duration = Duration::from_millis(100);
    let patience = previous.snapshot().server.drain_timeout;
    tokio::spawn(async move {
        let deadline = Instant::now() + patience;
        while Arc::strong_count(&previous) > 1 && Instant::now() < deadline {
            tokio::time::sleep(LOOK).await;
        }
        let retired = Arc::clone(&previous);
        // waits for Redis, for a second at most
        let _ = aside(move || retired.retire(&after)).await;
        while Arc::strong_count(&previous) > 1 {
            tokio::time::sleep(LOOK).await;
        }
        let _ = aside(move || {
            drop(previous);
            give_memory_back();
        })
        .await;
    });
}

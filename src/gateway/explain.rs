//! Explains how the gateway would handle a described request, and why.
//!
//! Runs the real request path on a fresh table with an observer attached. Nothing is decided here:
//! `Worker::decide` decides and reports its reasoning to the observer
//! (`Identifier::identify_with`, `Applicability`). Secrets are neither kept nor shown: request
//! fields appear by name, keys as access lines show them.

mod recall;
pub(super) mod report;
mod sent;
mod text;
mod words;

use std::{
    net::IpAddr,
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use http::HeaderMap;

use super::{
    active_config::ActiveConfig,
    applied_limit::{Applicability, LimitOutcome},
    decision_effect::DecisionEffect,
    described::{Described, DescribedSource},
    observer::DecisionObserver,
    plan::{LimitPlan, PlanError},
    process::Process,
    request_context::{LocalReply, RequestContext, Resolved, UpstreamTarget},
    worker::Worker,
};
use crate::{
    config::{Mode, Snapshot},
    identity::{
        ClientCertificate, HeldToken, IdentityStep,
        address::{AddressFault, AddressStep, ELEMENTS_MAX},
    },
    limit::Standing,
    listener::{self, Peer, tls::CertificateRefusal},
    response::Refusal,
    telemetry::{AccessLines, Metrics, trace::TraceSettings},
};
use words::{allowance, chosen_by, exception, outcome_text, source};

pub use report::*;
pub use text::ExplanationText;

/// Why a request cannot be explained.
#[derive(Debug, thiserror::Error)]
pub enum Unexplained {
    /// The configuration does not fit this process.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The client's TLS handshake fails, so its request never arrives.
    #[error(transparent)]
    Certificate(#[from] CertificateRefusal),
}

/// Explains one request as the first after a start: every bucket is full. Opens no connection and
/// writes no line.
pub fn explain(mut snapshot: Snapshot, described: &Described) -> Result<Explanation, Unexplained> {
    snapshot.log.access = AccessLines::Off;
    // Explain a shared limit as if this gateway had it to itself.
    snapshot.redis = None;
    snapshot.trace = TraceSettings::default();
    let process = Process::start(&snapshot, Metrics::install()).map_err(PlanError::System)?;
    let active = ActiveConfig::prepare(&process, Arc::new(snapshot), None)?;
    let worker = Worker::new(Arc::new(active), None);
    // Charge these private buckets, so that limits report what is left after the request.
    Ok(worker.explain(described, FRESH, DecisionEffect::Charge)?)
}

/// The state that an explanation assumes: after a start, now, or at the time of a past decision.
const FRESH: &str = "if nothing has been spent from them yet";
const NOW: &str = "as they stand now";
const THEN: &str = "as they stood when it was decided";

impl ActiveConfig {
    /// Explains one request against the gateway's present state. Charges nothing, counts nothing,
    /// opens no connection.
    pub fn explain(&self, described: &Described) -> Result<Explanation, Unexplained> {
        let worker = Worker::new(Arc::new(self.beside()?), None);
        Ok(worker.explain(described, NOW, DecisionEffect::Look)?)
    }
}

/// Polls a decision that has nothing to wait for, once.
fn at_once<T>(decision: impl Future<Output = Result<T, LocalReply>>) -> Result<T, LocalReply> {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(decision).poll(&mut context) {
        Poll::Ready(said) => said,
        Poll::Pending => Err(Refusal::Internal.into()),
    }
}

/// Records the steps of a decision for display.
#[derive(Debug)]
struct StepRecorder<'a> {
    worker: &'a Worker,
    asked: Option<ExplainedRequest>,
    limits: Vec<(&'a LimitPlan, Applicability<'a>)>,
}

impl<'a> DecisionObserver<'a> for StepRecorder<'a> {
    fn resolved(&mut self, request: &RequestContext<'a>, resolved: &Resolved<'a>) {
        self.asked = Some(self.worker.asked(request, &resolved.target));
    }

    fn limit(&mut self, limit: &'a LimitPlan, applicability: &Applicability<'a>) {
        self.limits.push((limit, applicability.clone()));
    }
}

impl Worker {
    fn explain(
        &self,
        described: &Described,
        when: &'static str,
        effect: DecisionEffect,
    ) -> Result<Explanation, CertificateRefusal> {
        let plan = &self.active.plan;
        let head = &described.head;
        let (listener, holder) = self.enter(described)?;
        let mut explained =
            self.explain_identity(described.peer, holder.as_ref(), &head.headers, when);
        let listener = Rc::new(listener.clone());
        let from = Peer::described(described.peer, listener, holder.map(Rc::new));
        let token = HeldToken::default();
        let mut request =
            RequestContext::begin(head, &from, &token, &plan.unrouted, self.request_ids.next());
        let mut body = DescribedSource::new(&described.body);
        let mut notes = StepRecorder {
            worker: self,
            asked: None,
            limits: Vec::new(),
        };
        let decided = at_once(self.decide(&mut request, &mut body, effect, &mut notes));
        explained.asked = notes.asked;
        explained.limits = self.limits(&request, &notes.limits);
        explained.answer = match decided {
            Err(LocalReply::Denied) => denied(&request),
            Err(LocalReply::Refused(refusal)) => ExplainedOutcome::Refused(refused(&refusal)),
            Err(LocalReply::OwnQuotas) => ExplainedOutcome::OwnQuotas,
            Ok(target) => match self.sent_on(&request, &target, described.body.bytes()) {
                Some(forwarded) => ExplainedOutcome::Forwarded(forwarded),
                None => ExplainedOutcome::Refused(refused(&Refusal::Internal)),
            },
        };
        Ok(explained)
    }

    /// Picks the listener: the first one, or the first that accepts the client's certificate. Also
    /// returns the certificate's holder.
    fn enter(
        &self,
        described: &Described,
    ) -> Result<(&listener::ListenerSettings, Option<ClientCertificate>), CertificateRefusal> {
        let listeners = &self.active.snapshot().listeners;
        let Some(presented) = &described.certificate else {
            return Ok((&listeners[0], None));
        };
        let now = SystemTime::now();
        let mut refused = CertificateRefusal::NotAsked;
        for listener in listeners {
            let tls = listener.tls.as_ref();
            match tls.map(|tls| tls.holder(presented, now)) {
                Some(Ok(holder)) => return Ok((listener, Some(holder))),
                Some(Err(why)) if refused == CertificateRefusal::NotAsked => refused = why,
                Some(Err(_)) | None => {}
            }
        }
        Err(refused)
    }

    /// Explains the client's identity step by step.
    fn explain_identity(
        &self,
        peer: IpAddr,
        certificate: Option<&ClientCertificate>,
        headers: &HeaderMap,
        when: &'static str,
    ) -> Explanation {
        let identity = &self.active.snapshot().identity;
        let (mut address, mut users) = (Vec::new(), Vec::new());
        let mut seen = 0;
        let held = HeldToken::default();
        let found = self.active.plan.identifier.identify_with(
            peer,
            certificate,
            headers,
            self.tokens(&held),
            |thought| match thought {
                IdentityStep::Address(step) => {
                    seen += usize::from(matches!(step, AddressStep::Element { .. }));
                    address.push(step.to_string());
                }
                IdentityStep::User { place, outcome } => users.push(UserSourceShown {
                    source: identity.users.get(place).map_or_else(String::new, source),
                    outcome: outcome_text(outcome, identity.users.get(place), certificate),
                }),
            },
        );
        let client = found.unwrap_or_else(|rejected| rejected.client);
        if seen > 0 {
            let unseen = self.active.plan.identifier.unseen(headers, seen);
            let believed = |text: &&[u8]| {
                format!(
                    "\"{}\" is ignored: anybody can have written it",
                    text.escape_ascii()
                )
            };
            address.extend(unseen.iter().take(ELEMENTS_MAX).map(believed));
        }
        Explanation {
            who: ClientShown {
                peer: client.peer,
                header: identity.address_from.name(),
                steps: address,
                address: client.address,
                doubt: client.doubt.map(AddressFault::label),
                users,
                user: client.user.map(str::to_owned),
                tier: client.tier.map(str::to_owned),
                tenant: client.tenant.map(str::to_owned),
            },
            asked: None,
            when,
            limits: Vec::new(),
            answer: ExplainedOutcome::Refused(refused(&Refusal::Internal)),
        }
    }

    /// Describes the request's target and its route.
    fn asked(&self, request: &RequestContext<'_>, target: &UpstreamTarget<'_>) -> ExplainedRequest {
        let plan = &self.active.plan;
        let (host, path) = request
            .decision
            .attributes
            .as_ref()
            .map_or(("", ""), |asked| (&*asked.host, &*asked.path));
        let snapshot = self.active.snapshot();
        let shown = |index: usize| {
            let route = &snapshot.routes[index];
            RouteShown {
                name: route.name.clone(),
                pattern: route.pattern.to_string(),
            }
        };
        let page = || {
            request.decision.route.shows_quotas.then(|| RouteShown {
                name: request.decision.route.name.clone(),
                pattern: path.to_owned(),
            })
        };
        let sent = target.path_and_query.split('?').next().unwrap_or_default();
        ExplainedRequest {
            method: request.head.method.to_string(),
            host: host.to_owned(),
            path: request.head.uri.path().to_owned(),
            matched_path: path.to_owned(),
            sent_path: sent.to_owned(),
            route: request.decision.route.index.map(shown).or_else(page),
            also: plan
                .table
                .matching(host, path)
                .into_iter()
                .filter(|index| Some(*index) != request.decision.route.index)
                .map(shown)
                .collect(),
            params: request.decision.route.index.map_or_else(Vec::new, |index| {
                let params = plan.table.params(index, path);
                let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
                params.iter().map(owned).collect()
            }),
            cost: request.decision.route.cost,
        }
    }

    fn limits(
        &self,
        request: &RequestContext<'_>,
        noted: &[(&LimitPlan, Applicability<'_>)],
    ) -> Vec<LimitShown> {
        let shown = |limit: &LimitPlan| {
            // Limits after the one that refuses the request were not asked.
            let mut noted = noted.iter().rev();
            let (_, applicability) = noted.find(|(other, _)| std::ptr::eq(*other, limit))?;
            Some(self.limit(request, limit, applicability))
        };
        request
            .decision
            .route
            .limits
            .iter()
            .filter_map(shown)
            .collect()
    }

    fn limit(
        &self,
        request: &RequestContext<'_>,
        limit: &LimitPlan,
        applicability: &Applicability<'_>,
    ) -> LimitShown {
        let rule = &limit.rule;
        let (settings, plan) = (&rule.settings, &self.active.plan);
        let key = request.attributes().map_or_else(String::new, |attributes| {
            request
                .decision
                .with_subject(&plan.table, attributes, |subject| {
                    rule.key
                        .readable(&self.active.process.hasher, plan.prefixes, subject)
                })
        });
        let client = request.attributes().map(|attributes| &attributes.client);
        let mut shown = LimitShown {
            name: rule.name.clone(),
            algorithm: rule.algorithm,
            scope: settings.scope(),
            mode: rule.mode().as_str(),
            parts: settings.key.iter().map(ToString::to_string).collect(),
            key,
            quota: String::new(),
            because: String::new(),
            standing: None,
            outcome: Outcome::Unkeyed,
        };
        shown.outcome = match applicability {
            Applicability::Off => not_applied("mode = \"off\""),
            Applicability::SwitchedOff => not_applied("an operator has switched it off"),
            Applicability::NotForGuesses => {
                not_applied("limits on users need a credential that verifies")
            }
            Applicability::Exempt(None) => not_applied("its `exempt` names the client"),
            Applicability::Exempt(Some(index)) => {
                shown.because = exception(settings, *index);
                not_applied(&shown.because)
            }
            Applicability::NoKey => {
                not_applied("a part of its key has no value (missing = \"skip\")")
            }
            Applicability::MissingKey => Outcome::Unkeyed,
            Applicability::NotRead => {
                not_applied("another limit rejects the request before its body is read")
            }
            Applicability::Granted(boost) => {
                let left = boost.left();
                not_applied(&format!("an operator has granted {left} more to this key"))
            }
            Applicability::Applies(applied) => {
                shown.quota = allowance(settings, applied.tier());
                shown.because = match applied.by_override() {
                    Some(index) => exception(settings, index),
                    None if applied.block.is_some() => "an operator has banned this key".to_owned(),
                    None => chosen_by(settings, applied.tier(), client),
                };
                let outcome = request.decision.limits.of(limit);
                shown.standing = outcome
                    .and_then(|one| one.finding)
                    .map(|finding| shown_standing(&finding.standing()));
                match (outcome, applied.is_enforced) {
                    (Some(outcome), true) => enforced(outcome),
                    (Some(outcome), false) if outcome.denies() && rule.mode() == Mode::Tag => {
                        Outcome::Tagged
                    }
                    (Some(outcome), false) => Outcome::Observed {
                        would_reject: outcome.denies(),
                    },
                    (None, true) => {
                        not_applied("the request was rejected before this limit was checked")
                    }
                    (None, false) => not_applied("another limit rejects the request"),
                }
            }
        };
        shown
    }
}

/// The outcome of an enforced limit.
fn enforced(outcome: &LimitOutcome<'_>) -> Outcome {
    let settings = &outcome.applied.limit.rule.settings;
    let Some(standing) = outcome.finding.map(|finding| finding.standing()) else {
        return not_applied("the request was rejected before this limit was checked");
    };
    match standing.denied {
        true => Outcome::Rejected {
            never: standing.never,
            retry_after: standing.retry_after_ns.map(Duration::from_nanos),
        },
        false if !settings.count_status.is_empty() => {
            let statuses = settings.count_status.iter();
            Outcome::CountsLater(statuses.map(|status| status.as_u16()).collect())
        }
        false if standing.delay_ns > 0 => Outcome::Delayed(Duration::from_nanos(standing.delay_ns)),
        false => Outcome::Admitted,
    }
}

/// The 429 answer, with the time of the next possible success.
fn denied(request: &RequestContext<'_>) -> ExplainedOutcome {
    let denial = request.decision.limits.standings().denial();
    ExplainedOutcome::Denied {
        retry_after: denial.and_then(|denial| Some(Duration::from_nanos(denial.retry_after_ns?))),
    }
}

fn not_applied(why: &str) -> Outcome {
    Outcome::NotApplied(why.to_owned())
}

fn refused(refusal: &Refusal) -> Refused {
    Refused {
        status: refusal.status().as_u16(),
        sentence: refusal.sentence(),
    }
}

fn shown_standing(standing: &Standing) -> StandingShown {
    StandingShown {
        remaining: standing.remaining,
        capacity: standing.capacity,
    }
}

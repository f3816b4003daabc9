//! Limits that are keyed by a field of the body: the step that live requests, `/check` and `explain` share.
//!
//! ```text
//! limits that need no body ─▶ refuse already? 429, and no byte of the body is read, nothing charged
//!           │ no
//!     read the body ─▶ no room for it? 503, nothing charged
//!           │
//!     all limits together: charged, or not at all ─▶ only now 413, 400, 408, if the body failed
//! ```
//!
//! The fields of a body that fails are unclear, and it is charged like one that is whole: a client that cuts its bodies short
//! would otherwise ask for nothing as often as it likes.

use bytes::Bytes;
use tokio::time::Instant;

use super::{
    Exchange, Worker,
    admit::{LACKS_KEY, Met, Noted, What},
    exchange::PerLimit,
    plan::{LimitPlan, RoutePlan},
};
use crate::{
    identity::{BodyFields, BodyFormat},
    response::Refusal,
};

impl Worker {
    /// Decides by all limits of the route. `read` gives the whole body, `None` where it is longer than may be read, or what
    /// is wrong with it; it is called only where a field is wanted and no other limit refuses the request.
    pub(super) async fn decide_limits<'a>(
        &self,
        exchange: &mut Exchange<'a>,
        guesses: bool,
        has_body: bool,
        read: impl AsyncFnOnce(&Exchange<'a>) -> Result<Option<Bytes>, Refusal>,
        mut note: impl FnMut(&'a LimitPlan, Noted<'a>),
    ) -> Result<(), Refusal> {
        let wanted = &exchange.route.wanted_fields;
        if has_body && !wanted.is_empty() {
            let format = BodyFormat::of(&exchange.head.headers);
            let is_known = format != BodyFormat::Unclear && exchange.body_failed.is_none();
            let mut whole = None;
            if is_known {
                if self.refuse_before_body(exchange, guesses, &mut note)? {
                    return Ok(());
                }
                match read(exchange).await {
                    Ok(read) => whole = read,
                    Err(refusal) if refusal.is_temporary() => return Err(refusal),
                    Err(refusal) => exchange.body_failed = Some(Box::new(refusal)),
                }
                exchange.decided_at = Instant::now();
            }
            let fields = whole.map(|bytes| format.read(&bytes, wanted));
            exchange.body = Some(fields.unwrap_or_else(BodyFields::unclear));
        }
        self.admit(exchange, guesses, note).await
    }

    /// Asks the limits that need no body, and charges none. Where they refuse the request, that is the verdict. Limits that
    /// gateways share are asked later: only Redis knows.
    fn refuse_before_body<'a>(
        &self,
        exchange: &mut Exchange<'a>,
        guesses: bool,
        note: &mut impl FnMut(&'a LimitPlan, Noted<'a>),
    ) -> Result<bool, Refusal> {
        let route: &'a RoutePlan = exchange.route;
        let Some(asked) = &exchange.asked else {
            return Ok(false);
        };
        let needs_body = |limit: &LimitPlan| !limit.rule.key.wanted_body_fields().is_empty();
        let (verdict, acting) =
            exchange.with_subject(&self.shared.plan.table, asked, |subject| {
                let mut acting: PerLimit<Met<'a>> = PerLimit::new();
                for limit in route.limits.iter().filter(|limit| !needs_body(limit)) {
                    match self.stance(asked, limit, guesses, subject).what {
                        What::Unkeyed => {
                            note(limit, Noted::Unkeyed);
                            return Err(LACKS_KEY);
                        }
                        What::Met(met, true) if !met.is_shared() => acting.push(met),
                        What::Met(..) | What::Nothing(_) | What::Boost(_) => {}
                    }
                }
                let now_ns = self.shared.nanoseconds(exchange.decided_at);
                let verdict = self.ask(now_ns, route, &acting, true);
                if !verdict.admitted() {
                    for limit in &route.limits {
                        match needs_body(limit) {
                            true => note(limit, Noted::NotRead),
                            false => self
                                .stance(asked, limit, guesses, subject)
                                .noted(limit, note),
                        }
                    }
                }
                Ok((verdict, acting))
            })?;
        if verdict.admitted() {
            return Ok(false);
        }
        let now_ns = self.shared.nanoseconds(exchange.decided_at);
        exchange.verdict = verdict;
        self.charge_rejected(exchange, now_ns, route, &acting);
        exchange.met = acting;
        Ok(true)
    }
}

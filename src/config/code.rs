//! The stable codes of diagnostics. Each has a section in docs/diagnostics.md. A code is never
//! reused.

macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// What kind of problem a diagnostic reports.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code { $($(#[doc = $doc])+ $name,)+ }

        impl Code {
            /// Every code, in the order of its number.
            pub const ALL: &[Code] = &[$(Code::$name,)+];

            /// The code as shown: `TG0101`.
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$name => $text,)+ }
            }
        }
    };
}

codes! {
    /// The configuration file cannot be read.
    Unreadable = "TG0001",
    /// The file is not UTF-8.
    NotUtf8 = "TG0002",
    /// The file is not TOML.
    Syntax = "TG0003",
    /// `${NAME}` is malformed, or the variable is not set.
    Environment = "TG0004",
    /// The configuration is valid, but this process cannot apply it.
    Unfit = "TG0005",

    /// A key or table that does not exist.
    UnknownKey = "TG0101",
    /// A documented key, table or value whose feature is not built yet.
    NotBuilt = "TG0102",
    /// A number where text is expected, and the like.
    WrongType = "TG0103",
    /// A value outside its bounds.
    OutOfRange = "TG0104",
    /// A required key is missing.
    MissingKey = "TG0105",
    /// A word that is not one of the key's choices.
    UnknownChoice = "TG0106",
    /// A name that is not safe to show to clients or use as a metric label.
    BadName = "TG0107",
    /// A duplicate of something that must be unique.
    Duplicate = "TG0108",
    /// A key that has a new name.
    RenamedKey = "TG0109",

    /// Not a duration.
    BadDuration = "TG0201",
    /// Not a size.
    BadSize = "TG0202",
    /// Not a rate.
    BadRate = "TG0203",
    /// A rate of zero.
    ZeroRate = "TG0204",
    /// Not an address, a network or a server.
    BadAddress = "TG0205",
    /// Not the name or value of an HTTP field or method.
    BadField = "TG0206",
    /// Not a date, or one without its offset.
    BadDate = "TG0207",
    /// A setting that a limit on costs cannot have.
    UnfitCost = "TG0208",
    /// Not a decimal number.
    BadDecimal = "TG0209",

    /// A file that the configuration names cannot be used.
    BadFile = "TG0301",
    /// A digest that is not the SHA-256 of a key.
    BadDigest = "TG0302",
    /// The admin listener is reachable from outside and has no token.
    AdminWithoutToken = "TG0303",
    /// Every peer is trusted as a proxy.
    TrustsEverybody = "TG0304",
    /// No request can have the value that a limit or a user table needs.
    NeverIdentified = "TG0305",
    /// A forwarding header that no proxy is trusted to write.
    HeaderNeverRead = "TG0306",
    /// Clients can guess API keys without limit.
    UnlimitedGuessing = "TG0307",
    /// An API key with a tier that no limit names.
    TierWithoutQuota = "TG0308",
    /// Tokens are accepted without checking their issuer or audience.
    TokenForAnyone = "TG0309",
    /// Keys are fetched without TLS, so they can be changed in transit.
    KeysInTheClear = "TG0310",
    /// A key in a key set that verifies no token.
    UnusedKey = "TG0311",
    /// A certificate that is not valid now, or expires soon.
    CertificateExpires = "TG0312",

    /// A route or table names a limit that is not defined.
    UnknownLimit = "TG0401",
    /// A route names an upstream that is not defined.
    UnknownUpstream = "TG0402",
    /// A route that is malformed, or that matches the same requests as another.
    RouteConflict = "TG0403",
    /// A request costs more than a limit can ever admit.
    CostOverQuota = "TG0404",
    /// More limits apply to a request than can be decided at once.
    TooManyLimits = "TG0405",
    /// Two keys that contradict each other.
    Contradiction = "TG0406",
    /// An exception that does not fit its limit.
    UnfitOverride = "TG0407",
    /// A limit names a price table that is not defined.
    UnknownPrices = "TG0408",

    /// A limit that applies to no route.
    UnusedLimit = "TG0501",
    /// An upstream that no route uses.
    UnusedUpstream = "TG0502",
    /// A tier whose bucket is smaller than the cost of a route.
    CostOverBurst = "TG0503",
    /// `skip_limits` names a limit that does not apply to the route anyway.
    SkipsNothing = "TG0504",
    /// A tier that no limit and no user has.
    UnknownTier = "TG0505",
    /// An expired exception.
    Expired = "TG0506",
    /// A limit with `scope = "global"` but without `[redis]`.
    NothingShared = "TG0507",
    /// A limit keyed only by values that clients choose.
    ChosenKey = "TG0508",
    /// A price table that no limit uses.
    UnusedPrices = "TG0509",
    /// A limit on costs without a bound on requests in flight.
    UnboundedCost = "TG0510",
    /// A debt bound that forgives sustained overuse.
    ForgivingDebt = "TG0511",
}

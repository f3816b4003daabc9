//! The stable codes of the diagnostics. Each has a section in docs/diagnostics.md; a code is never reused.

macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// What kind of problem a diagnostic reports.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code { $($(#[doc = $doc])+ $name,)+ }

        impl Code {
            /// Every code, in the order of its number.
            pub const ALL: &[Code] = &[$(Code::$name,)+];

            /// The code as people see it: `TG0101`.
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
    /// The configuration is correct and cannot be put to work in this process.
    Unfit = "TG0005",

    /// A key or table that does not exist.
    UnknownKey = "TG0101",
    /// A key, table or value of the contract whose feature is not built yet.
    NotBuilt = "TG0102",
    /// A number where text is expected, and the like.
    WrongType = "TG0103",
    /// A value outside its bounds.
    OutOfRange = "TG0104",
    /// A key without which the table means nothing.
    MissingKey = "TG0105",
    /// A word that is not among the choices of its key.
    UnknownChoice = "TG0106",
    /// A name that could not be shown to clients or used as a metric label.
    BadName = "TG0107",
    /// The same thing twice where it may stand once.
    Duplicate = "TG0108",

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

    /// A file that the configuration names cannot be used.
    BadFile = "TG0301",
    /// A digest that is not the SHA-256 of a key.
    BadDigest = "TG0302",
    /// The admin listener is reachable from outside and has no token.
    AdminWithoutToken = "TG0303",
    /// Every peer is trusted as a proxy.
    TrustsEverybody = "TG0304",
    /// No request can carry what a limit or a user table looks for.
    NeverIdentified = "TG0305",
    /// A forwarding header that no proxy is trusted to write.
    HeaderNeverRead = "TG0306",
    /// Unknown API keys are refused, as often as anybody likes to try.
    UnlimitedGuessing = "TG0307",
    /// A key whose tier no limit names.
    TierWithoutQuota = "TG0308",
    /// Tokens are accepted without a look at who issued them, or for whom.
    TokenForAnyone = "TG0309",
    /// Keys are fetched over a connection that anybody on the way can change.
    KeysInTheClear = "TG0310",
    /// A key of a file that verifies no token.
    UnusedKey = "TG0311",
    /// A certificate that is not valid now, or not for long.
    CertificateExpires = "TG0312",

    /// A limit that is named but not defined.
    UnknownLimit = "TG0401",
    /// An upstream that is named but not defined.
    UnknownUpstream = "TG0402",
    /// A route that is malformed, or that takes the same requests as another.
    RouteConflict = "TG0403",
    /// A request costs more than a limit can ever admit.
    CostOverQuota = "TG0404",
    /// A request meets more limits than can be decided at once.
    TooManyLimits = "TG0405",
    /// Two keys that contradict each other.
    Contradiction = "TG0406",
    /// An exception that its limit cannot make.
    UnfitOverride = "TG0407",

    /// A limit that no route meets.
    UnusedLimit = "TG0501",
    /// An upstream that no route uses.
    UnusedUpstream = "TG0502",
    /// A tier whose bucket is smaller than the cost of a route.
    CostOverBurst = "TG0503",
    /// `skip_limits` names a limit that the route would not meet anyway.
    SkipsNothing = "TG0504",
    /// A tier that nobody is known to have.
    UnknownTier = "TG0505",
    /// An exception whose time is over.
    Expired = "TG0506",
    /// A limit that gateways should share, and nothing that they share it through.
    NothingShared = "TG0507",
    /// A limit that is keyed by nothing but what clients choose.
    ChosenKey = "TG0508",
}

"""Jobs that shrink and grow without storage: their hosts keep their last states. See docs/elastic.md."""

from reshard.api.elastic import (
    GatherReport as GatherReport,
    KeepReport as KeepReport,
    RecoverReport as RecoverReport,
    Tier as Tier,
    gather as gather,
)

"""Jobs that shrink and grow without storage: their hosts keep their last states. See docs/elastic.md."""

from reshard.api.elastic import GatherReport as GatherReport
from reshard.api.elastic import KeepReport as KeepReport
from reshard.api.elastic import RecoverReport as RecoverReport
from reshard.api.elastic import Tier as Tier
from reshard.api.elastic import gather as gather

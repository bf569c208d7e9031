# The word after a call is its question in the reference (docs/_site/public_names.py).
from . import architecture as architecture
from . import draw as draw
from . import errors as errors
from . import reducers as reducers
from . import results as results
from .distributed.engine import Ray as Ray
from .errors import AttnmechError as AttnmechError
from .interventions import Intervention as Intervention
from .live.explore import explore as explore
from .methods.ablation.heads import ablate_heads as ablate_heads  # matter
from .methods.ablation.importance import head_importance as head_importance  # matter
from .methods.ablation.pairs import ablate_pairs as ablate_pairs  # matter
from .methods.ablation.pruning import prune_heads as prune_heads  # matter
from .methods.ablation.sweep import ablate_set as ablate_set  # matter
from .methods.ablation.sweep import sweep as sweep  # matter
from .methods.answers.contrast_answers import contrast_answers as contrast_answers  # matter
from .methods.attribution.result import attribute as attribute  # matter
from .methods.claims.result import confirm_heads as confirm_heads  # heads
from .methods.claims.tasks import Case as Case
from .methods.claims.tasks import Task as Task
from .methods.compare.result import compare as compare  # heads
from .methods.drift.result import residual_drift as residual_drift  # write
from .methods.examples.result import examples as examples  # look
from .methods.faithfulness.result import faithfulness as faithfulness  # matter
from .methods.flow.result import attention_flow as attention_flow  # look
from .methods.focus.attention_focus import attention_focus as attention_focus  # look
from .methods.function_heads.result import function_heads as function_heads  # matter
from .methods.groups.result import group_attention as group_attention  # look
from .methods.head_types.head_types import head_types as head_types  # look
from .methods.head_types.relations import relations as relations  # look
from .methods.joint_embedding.result import joint_embedding as joint_embedding  # look
from .methods.kv_scores.result import kv_scores as kv_scores  # matter
from .methods.likeness.odd_heads import odd_heads as odd_heads  # look
from .methods.likeness.redundancy import redundancy as redundancy  # look
from .methods.null_attention.result import null_attention as null_attention  # matter
from .methods.ov_tokens.result import ov_tokens as ov_tokens  # write
from .methods.patching.patch import patch as patch  # matter
from .methods.patching.path_patch import path_patch as path_patch  # matter
from .methods.qk_directions.result import qk_directions as qk_directions  # why
from .methods.scores.composition import composition as composition  # why
from .methods.scores.decompose_by_source import decompose_by_source as decompose_by_source  # why
from .methods.scores.decompose_scores import decompose_scores as decompose_scores  # why
from .methods.scores.variance_shares import variance_shares as variance_shares  # why
from .methods.segments.segment_attention import segment_attention as segment_attention  # look
from .methods.segments.segment_effects import segment_effects as segment_effects  # matter
from .methods.steering.mean_difference import mean_difference as mean_difference  # matter
from .methods.steering.steer import steer as steer  # matter
from .methods.trajectory.result import trajectory as trajectory  # heads
from .methods.updates.result import residual_updates as residual_updates  # write
from .model.files.load import load as load
from .model.files.load import untrained as untrained
from .model.proof.certify import certify as certify
from .model.run.hooked import HookedModel as HookedModel
from .model.structure.architecture import Architecture as Architecture
from .pages.atlas.atlas import atlas as atlas
from .pages.report import report as report
from .results.circuit import Circuit as Circuit
from .results.result import load_result as load_result
from .runs.corpus import Corpus as Corpus
from .runs.corpus_files import CorpusFiles as CorpusFiles
from .runs.mean_qk import mean_qk as mean_qk  # why
from .runs.reducer import Reducer as Reducer
from .runs.reference import mean_z as mean_z
from .runs.stream import stream as stream
from .served import engine_statistics as engine_statistics  # look

__version__: str

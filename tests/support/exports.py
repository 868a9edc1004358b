"""Exports of tools: small made-up files in each tool's own layout, all of the same three answers."""

from __future__ import annotations

import io
import json
import zipfile

import pandas as pd

Triples = list[tuple[str, str, object]]
CATS: Triples = [("a.jpg", "ann", "cat"), ("a.jpg", "bob", "dog"), ("b.jpg", "ann", "dog")]


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def studio(task: int, image: str, *answers: tuple[str, list[str], bool]) -> dict:
    return {
        "id": task,
        "data": {"image": f"/data/upload/1/{image}"},
        "annotations": [
            {
                "id": 10 * task + n, "completed_by": {"id": n, "email": who}, "was_cancelled": skipped,
                "created_at": "2024-01-01T00:00:00Z", "updated_at": f"2024-01-0{n + 1}T00:00:00Z", "lead_time": 2.5,
                "result": [
                    {"from_name": "kind", "to_name": "image", "type": "choices", "value": {"choices": choices}},
                    {"from_name": "box", "to_name": "image", "type": "rectanglelabels",
                     "value": {"x": 1, "y": 2, "width": 3, "height": 4, "rectanglelabels": ["tail"]}},
                ],
            }
            for n, (who, choices, skipped) in enumerate(answers)
        ],
        "predictions": [{"result": [{"from_name": "kind", "value": {"choices": ["cow"]}}]}],
    }  # fmt: skip


def prodigy(image: str, who: str, accept: list[str], answer: str = "accept") -> dict:
    options = [{"id": "cat", "text": "Cat"}, {"id": "dog", "text": "Dog"}]
    return {
        "image": "data:image/png;base64,AAAA", "path": image, "options": options, "accept": accept, "answer": answer,
        "_input_hash": 1, "_task_hash": 2, "_session_id": f"pets-{who}", "_annotator_id": who, "_timestamp": 1,
    }  # fmt: skip


STUDIO = [
    studio(1, "a.jpg", ("ann", ["cat"], False), ("bob", ["dog"], False)),
    studio(2, "b.jpg", ("ann", ["dog"], False), ("bob", ["dog"], True)),
]
MIN = [
    {"image": image, "id": 1, "kind": label, "annotator": who, "annotation_id": n, "created_at": "2024-01-01",
     "updated_at": "2024-01-01", "lead_time": 3.2}
    for n, (image, who, label) in enumerate(CATS)
]  # fmt: skip
COCO = {
    "images": [{"id": 1, "file_name": "a.jpg", "width": 8, "height": 8}, {"id": 2, "file_name": "b.jpg"}],
    "categories": [{"id": 1, "name": "cat", "supercategory": "pet"}, {"id": 7, "name": "dog"}],
    "annotations": [
        {"id": n, "image_id": 1 if image == "a.jpg" else 2, "category_id": {"cat": 1, "dog": 7}[label],
         "bbox": [], "attributes": {"annotator": who}}
        for n, (image, who, label) in enumerate(CATS)
    ],
}  # fmt: skip


def coco(who: str) -> dict:
    """Its annotations without a word about who made them."""
    kept = [dict(a, attributes={}) for a in COCO["annotations"] if a["attributes"]["annotator"] == who]
    return COCO | {"annotations": kept}


def cvat(*images: tuple[str, str], user: str = "") -> str:
    who = f"<assignee><username>{user}</username><email></email></assignee>" if user else ""
    tags = "".join(
        f'<image id="{n}" name="{name}" width="8" height="8"><tag label="{label}" source="manual"></tag>'
        f'<box label="tail" xtl="0" ytl="0" xbr="1" ybr="1"></box></image>'
        for n, (name, label) in enumerate(images)
    )
    meta = f"<version>1.1</version><meta><task>{who}</task></meta>"
    return f'<?xml version="1.0" encoding="utf-8"?>\n<annotations>{meta}{tags}</annotations>'


def archive(**files: str | bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, content in files.items():
            packed.writestr(zipfile.ZipInfo(name.replace("__", ".")), content)  # of no time: the same bytes
    return stream.getvalue()


MTURK = (
    '"HITId","Title","AssignmentId","WorkerId","AssignmentStatus","SubmitTime","Input.image","Answer.kind","Approve",'
    '"Reject"\n'
    '"H1","Sort, of two","S1","ann","Approved","Mon Mar 02 10:11:00 PST 2020","a.jpg","cat"\n'
    '"H1","Sort, of two","S2","bob","Submitted","Mon Mar 02 10:12:00 PST 2020","a.jpg","dog"\n'
    '"H1","Sort, of two","S3","cem","Rejected","Mon Mar 02 10:13:00 PST 2020","a.jpg","cow"\n'
    '"H2","Sort, of two","S4","ann","Approved","Mon Mar 02 10:14:00 PST 2020","b.jpg","dog","x",""\n'
    '"H2","Sort, of two","S5","dan","Submitted","Mon Mar 02 10:15:00 PST 2020","b.jpg","cow","","too quick"\n'
)
FORM = "HITId,WorkerId,AssignmentStatus,Input.image,Answer.taskAnswers\n" + "".join(
    f'H,{who},Approved,{image},"[{{""kind"":{{""label"":""{label}""}}}}]"\n' for image, who, label in CATS
)
TOLOKA = "INPUT:image\tOUTPUT:kind\tGOLDEN:kind\tASSIGNMENT:task_id\tASSIGNMENT:worker_id\tASSIGNMENT:status\t" + (
    "ASSIGNMENT:submitted\n"
    "a.jpg\tcat\t\tt1\tann\tAPPROVED\t2020-03-02T10:00:00.1\n"
    "a.jpg\tdog\t\tt1\tbob\tSUBMITTED\t2020-03-02T10:00:00.2\n"
    "a.jpg\tcow\t\tt1\tcem\tREJECTED\t2020-03-02T10:00:00.3\n"
    "\t\t\t\t\t\t\n"
    "b.jpg\tdog\tdog\tt2\tann\tAPPROVED\t2020-03-02T10:00:00.4\n"
)
APPEN = (
    "_unit_id,_created_at,_id,_tainted,_channel,_trust,_worker_id,kind,kind_gold,image\n"
    "a.jpg,3/2/2020 10:00:00,1,false,elite,0.9,ann,cat,,x\n"
    "a.jpg,3/2/2020 10:00:01,2,false,elite,0.8,bob,dog,,x\n"
    "a.jpg,3/2/2020 10:00:02,3,true,elite,0.1,cem,cow,,x\n"
    "b.jpg,3/2/2020 10:00:03,4,false,elite,0.9,ann,dog,dog,y\n"
)


def zooniverse(*rows: Triples) -> str:
    frame = pd.DataFrame(
        {
            "classification_id": n, "user_name": who, "user_id": n, "workflow_id": 7, "created_at": "2020-03-02",
            "metadata": json.dumps({"source": "api"}),
            "annotations": json.dumps([{"task": "T0", "task_label": "What is it?", "value": label},
                                       {"task": "T1", "task_label": "Mark it", "value": [{"x": 1.5, "y": 2.5}]}]),
            "subject_data": json.dumps({f"9{image[0]}": {"retired": None, "Filename": image}}),
            "subject_ids": image,
        }
        for n, (image, who, label) in enumerate(rows)
    )  # fmt: skip
    return frame.to_csv(index=False)


def doccano(image: str, **more: object) -> dict:
    return {"id": 7, "filename": image, "Comments": [], **more}


def argilla(image: str, *answers: tuple[str, str, str]) -> dict:
    values = [{"user_id": who, "value": label, "status": status} for who, label, status in answers]
    return {
        "id": image, "fields": {"text": "a text"}, "metadata": {}, "suggestions": {"kind": {"value": "cow"}},
        "responses": {"kind": values}, "vectors": {}, "status": "completed", "_server_id": "f00",
    }  # fmt: skip


ARGILLA = [
    argilla("a.jpg", ("ann", "cat", "submitted"), ("bob", "dog", "submitted"), ("cem", "cow", "discarded")),
    argilla("b.jpg", ("ann", "dog", "submitted")),
]
ARGILLA_ROWS = [
    {"id": "a.jpg", "status": "completed", "text": "x", "kind.responses": ["cat", "dog"],
     "kind.responses.users": ["ann", "bob"], "kind.responses.status": ["submitted", "submitted"]},
    {"id": "b.jpg", "status": "completed", "text": "y", "kind.responses": ["dog", "cow"],
     "kind.responses.users": ["ann", "cem"], "kind.responses.status": ["submitted", "draft"]},
]  # fmt: skip
ARGILLA_ONE = [
    {"text": "x", "external_id": "a.jpg", "kind": [{"user_id": "ann", "value": "cat", "status": "submitted"},
                                                   {"user_id": "bob", "value": "dog", "status": "submitted"}]},
    {"text": "y", "external_id": "b.jpg", "kind": [{"user_id": "ann", "value": "dog", "status": "submitted"}]},
]  # fmt: skip
LISTS = [
    {"id": "a.jpg", "text": "x y z", "tokens": ["x", "y", "z"], "annotators": ["ann", "bob"], "labels": ["cat", "dog"]},
    {"id": "b.jpg", "text": "x", "tokens": ["x"], "annotators": ["ann"], "labels": ["dog"]},
]
LEWIDI = {
    "a.jpg": {"text": "x", "task": "pets", "number of annotations": 2, "number of annotators": 2,
              "annotations": "cat,dog", "annotators": "ann,bob", "lang": "en", "hard_label": "cat",
              "soft_label": {"cat": 0.5, "dog": 0.5}, "split": "train"},
    "b.jpg": {"text": "y", "annotations": "dog", "annotators": "ann", "soft_label": {"dog": 1.0}},
}  # fmt: skip
NAMES = {"task": "id", "worker": "annotators", "label": "labels"}

EXPORTS: dict[str, tuple[str, str | bytes, dict]] = {
    "label studio": ("label-studio", json.dumps(STUDIO), {}),
    "label studio min": ("label-studio-min", json.dumps(MIN), {}),
    "label studio csv": ("label-studio-csv", pd.DataFrame(MIN).to_csv(index=False), {}),
    "label studio tsv": ("label-studio-csv", pd.DataFrame(MIN).to_csv(index=False, sep="\t"), {}),
    "prodigy": ("prodigy", lines(*(prodigy(image, who, [label]) for image, who, label in CATS)), {}),
    "doccano with users": ("doccano", lines(
        doccano("a.jpg", annotations=[{"label": "cat", "user": "ann"}, {"label": "dog", "user": "bob"}]),
        doccano("b.jpg", annotations=[{"label": "dog", "user": "ann"}])), {}),
    "doccano archive": ("doccano", archive(
        ann__jsonl=lines(doccano("a.jpg", label=["cat"]), doccano("b.jpg", label=["dog"])),
        bob__jsonl=lines(doccano("a.jpg", label=["dog"]), doccano("b.jpg", label=[])),
        all__jsonl=lines(doccano("a.jpg", label=["cat", "dog"]))), {}),
    "argilla json": ("argilla", json.dumps(ARGILLA), {}),
    "argilla rows": ("argilla", lines(*ARGILLA_ROWS), {}),
    "argilla 1": ("argilla", lines(*ARGILLA_ONE), {}),
    "datasets": ("datasets", lines(*LISTS), NAMES),
    "cvat": ("cvat", archive(ann__xml=cvat(("a.jpg", "cat"), ("b.jpg", "dog")), bob__xml=cvat(("a.jpg", "dog"))), {}),
    "coco": ("coco", json.dumps(COCO), {"worker": "annotator"}),
    "coco archive": ("coco", archive(**{f"{who}__json": json.dumps(coco(who)) for who in ("ann", "bob")}), {}),
    "mturk": ("mturk", MTURK, {}),
    "mturk form": ("mturk", FORM, {}),
    "toloka": ("toloka", TOLOKA, {}),
    "appen": ("appen", APPEN, {}),
    "zooniverse": ("zooniverse", zooniverse(*CATS), {}),
    "zooniverse file names": ("zooniverse", zooniverse(*CATS), {"task": "subject.Filename"}),
    "get another label": ("get-another-label", "".join(f"{who}\t{t}\t{y}\n" for t, who, y in CATS), {}),
    "cleanlab": ("cleanlab", ",ann,bob\na.jpg,cat,dog\nb.jpg,dog,\n", {}),
    "cleanlab with a named index": ("cleanlab", "id,ann,bob\na.jpg,cat,dog\nb.jpg,dog,\n", {}),
    "lewidi 2023": ("lewidi", json.dumps(LEWIDI), {}),
    "lewidi 2025": ("lewidi", json.dumps(
        {"a.jpg": {"annotations": {"ann": "cat", "bob": "dog"}, "annotators": "ann,bob"},
         "b.jpg": {"annotations": {"ann": "dog"}}}), {}),
    "peerannot": ("peerannot", json.dumps({"a.jpg": {"ann": "cat", "bob": "dog"}, "b.jpg": {"ann": "dog"}}), {}),
}  # fmt: skip

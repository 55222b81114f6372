"""What family ``chat`` talks about: everyday things, lists of ideas, instructions, worries."""

from typing import NamedTuple

from blockdraft.pocket.dice import listed


class Thing(NamedTuple):
    """``a {name} is a {kind} that people use to {use}``; found ``{place}``; it is ``{trait}``."""

    name: str
    kind: str
    use: str
    place: str
    trait: str


def rows(table: str) -> list[list[str]]:
    """Lines of cells that are separated by semicolons."""
    return [[cell.strip() for cell in line.split(";")] for line in table.strip().split("\n")]


THINGS = [
    Thing(*row)
    for row in rows("""
    kettle; kitchen tool; boil water; in the kitchen; made of metal
    teapot; kitchen tool; serve tea; on the table; round and warm
    pan; kitchen tool; fry food; on the stove; flat and heavy
    spoon; kitchen tool; eat soup; in a drawer; small and smooth
    oven; kitchen device; bake bread; in the kitchen; very hot inside
    fridge; kitchen device; keep food cold; in the kitchen; cold inside
    broom; cleaning tool; sweep the floor; in a corner; long and light
    sponge; cleaning tool; wash dishes; near the sink; soft and wet
    bucket; cleaning tool; carry water; in the cellar; made of plastic
    hammer; building tool; drive nails; in a tool box; hard and heavy
    saw; building tool; cut wood; in a workshop; sharp
    ladder; building tool; reach high places; in the garage; tall and strong
    brush; painting tool; spread paint; in a studio; soft at one end
    needle; sewing tool; join cloth; in a small box; thin and sharp
    scissors set; sewing tool; cut paper or cloth; on a desk; sharp
    umbrella; everyday object; stay dry in the rain; near the door; easy to fold
    backpack; everyday object; carry books; on your back; light and strong
    wallet; everyday object; keep money safe; in a pocket; flat and small
    key; everyday object; open a lock; in a pocket; made of metal
    clock; household object; read the time; on the wall; quiet and exact
    lamp; household object; light a room; on a desk; bright
    mirror; household object; see yourself; in the bathroom; smooth and clear
    pillow; household object; rest your head; on the bed; soft
    blanket; household object; keep warm; on the sofa; soft and thick
    candle; household object; give some light; on the table; made of wax
    pencil; writing tool; draw and write; on a desk; made of wood
    notebook; writing tool; keep notes; in a bag; thin and light
    ruler; measuring tool; draw straight lines; in a drawer; straight
    scale; measuring tool; find the weight of things; in a shop; exact
    thermometer; measuring tool; read the temperature; near a window; exact and small
    compass; measuring tool; find the north; in a bag; small and round
    telescope; science instrument; look at the stars; on a hill; long and heavy
    microscope; science instrument; see tiny things; in a school; exact and heavy
    magnet; science instrument; pull small bits of iron; in a school; hard and cold
    bicycle; vehicle; travel short distances; on the street; light and fast
    train; vehicle; travel between cities; at a station; long and fast
    boat; vehicle; cross a river; at the harbor; made of wood
    truck; vehicle; move heavy goods; on the road; big and loud
    guitar; musical instrument; play songs; in a music room; made of wood
    drum; musical instrument; keep the beat; in a music room; round and loud
    flute; musical instrument; play soft tunes; in a small case; thin and light
    piano; musical instrument; play with both hands; in a hall; large and heavy
    radio; device; listen to the news; on a shelf; small and simple
    camera; device; take photos; in a bag; small and exact
    printer; device; put text on paper; in an office; loud
    phone; device; talk to people far away; in a pocket; flat and light
    tent; camping item; sleep outside; in the forest; easy to fold
    rope; camping item; tie things together; in a bag; long and strong
    shovel; garden tool; dig holes; in a shed; strong
    rake; garden tool; collect leaves; in a shed; long and light
    hose; garden tool; water plants; in the garden; long and soft
    library; public place; borrow books; in most towns; quiet
    museum; public place; see old things; in the city center; calm and large
    market; public place; buy fresh food; on the main square; busy and loud
    park; public place; rest and play; in most towns; green and open
    bridge; building; cross a river; near the water; long and strong
    """)
]

IDEAS: dict[str, list[str]] = {
    topic: items
    for topic, *items in rows("""
    things to pack for the beach; a towel; sun cream; a hat; water; a good book; a ball; fruit; sandals; an umbrella
    things to pack for a hike; strong shoes; a map; water; a warm jacket; nuts; a whistle; a hat; dry socks; a small knife
    healthy snacks; apples; carrots; plain nuts; yogurt; berries; a boiled egg; rice cakes; dried plums; a banana
    ways to save money; cook at home; make a list before shopping; use the bus; repair old things; compare prices; sell what you do not need; share tools
    ways to relax; take a walk; listen to music; drink tea; read a story; call a friend; take a warm bath; breathe slowly; draw something
    games for a rainy day; chess; cards; a puzzle; hide and seek; a word game; building with blocks; drawing; a quiz
    gifts for a friend; a plant; a book; a warm scarf; a photo in a frame; a cup; a box of tea; a board game; a candle
    ways to save energy; turn off the lights; close the windows; use a lid when cooking; wash with cold water; take short showers; unplug old devices; wear a sweater
    things to do in a garden; plant flowers; pull weeds; water the herbs; rake leaves; build a bird house; pick fruit; rest in the sun
    easy dinners; soup with bread; pasta with tomatoes; rice with beans; baked potatoes; a big salad; an omelet; vegetable curry; pancakes
    animals that live in water; fish; whales; frogs; crabs; otters; ducks; seals; turtles
    animals that live on a farm; cows; hens; sheep; goats; horses; pigs; ducks; dogs
    jobs that help people; nurse; teacher; doctor; fire fighter; baker; bus driver; farmer; plumber
    habits for good sleep; go to bed early; keep the room dark; put the phone away; avoid coffee at night; read for a while; open a window; keep the same hours
    tips for learning a language; read every day; listen to songs; speak with friends; keep a word list; watch films; repeat old lessons; write short notes
    things to check before a trip; your ticket; your passport; the weather; the doors and windows; your bags; the plan of the route; your phone battery
    uses for old jars; store rice; hold pens; grow herbs; keep buttons; make a lamp; mix a salad sauce; keep coins
    colors for a bedroom; light blue; soft green; warm white; pale yellow; sand; light gray; rose
    hobbies that cost little; drawing; running; singing; reading; bird watching; writing; knitting; chess
    rules for a good meeting; start on time; have a plan; let everyone speak; take notes; keep it short; end with clear tasks; thank the group
    """)  # noqa: E501
}

HOW_TO: dict[str, list[str]] = {
    task: steps
    for task, *steps in rows("""
    make a cup of tea; Fill the kettle with water; Boil the water; Put a tea bag in a cup; Pour the hot water over it; Wait for three minutes; Take out the bag; Add milk or sugar
    boil an egg; Fill a pot with water; Bring the water to a boil; Put the egg in with a spoon; Wait for seven minutes; Cool the egg in cold water; Peel it
    plant a tree; Choose a sunny place; Dig a deep hole; Put the tree into the hole; Fill it with earth; Water it well; Tie it to a stick
    wash a car; Park in the shade; Rinse the car with water; Wash it with a soft sponge; Clean the wheels; Rinse it again; Dry it with a cloth
    clean a window; Fill a bucket with warm water; Add a little soap; Wipe the glass with a sponge; Remove the water with a blade; Dry the edges
    fix a flat bicycle tire; Take off the wheel; Pull out the tube; Find the hole; Put a patch on it; Put the tube back; Pump it up
    write a letter; Write the date at the top; Greet the person; Say why you write; Tell your news; End with kind words; Sign your name
    bake bread; Mix flour, water, salt and yeast; Knead the dough; Let it rest for one hour; Form a loaf; Bake it in a hot oven; Let it cool down
    paint a wall; Cover the floor; Clean the wall; Stir the paint; Paint the edges with a brush; Paint the rest with a roller; Let it dry
    grow tomatoes; Fill a pot with earth; Put the seeds in; Keep them warm and wet; Move the plants into the sun; Tie them to sticks; Pick the red ones
    learn a poem; Read it aloud; Learn the first lines; Say them without looking; Add more lines each day; Repeat the whole poem before bed
    pack a suitcase; Make a list; Put heavy things at the bottom; Roll your clothes; Fill shoes with socks; Keep papers on top; Close it and check the weight
    make a salad; Wash the leaves; Cut the vegetables; Put all in a bowl; Mix oil, lemon and salt; Pour the sauce over it; Stir and serve
    sew on a button; Choose a matching thread; Pull it through the needle; Place the button; Sew through the holes; Wind the thread around; Make a knot
    set up a tent; Find a flat place; Remove the stones; Spread out the tent; Put in the poles; Fix the corners with pegs; Tighten the ropes
    take a good photo; Clean the lens; Look for good light; Move close to the subject; Hold the camera still; Press the button; Check the picture
    calm a crying child; Sit down on the same level; Speak in a low voice; Ask what is wrong; Listen; Offer a hug; Find something nice to do
    prepare for a test; Find out what is asked; Make a plan; Study a little every day; Solve old tests; Sleep well; Eat a good breakfast
    """)  # noqa: E501
}

WORRIES: dict[str, list[str]] = {
    worry: advice
    for worry, *advice in rows("""
    I am tired all day; go to bed earlier; drink more water; take a short walk at noon; eat a light lunch
    I cannot focus at work; turn off your phone; work in short blocks; clean your desk; take real breaks
    my plants are dying; give them less water; move them closer to the window; use fresh earth; look for insects
    I am nervous before a talk; practice it aloud; breathe slowly; know the first sentence well; smile at one person
    my room is always a mess; throw out what you do not use; give each thing a place; clean for ten minutes a day; use boxes
    I forget names; repeat the name at once; connect it to a picture; write it down; ask again politely
    I spend too much money; write down what you buy; wait a day before buying; pay in cash; plan your meals
    I do not know what to cook; look at what you have; plan three easy meals; cook more and freeze it; ask a friend
    my neighbor is loud; talk to him kindly; suggest quiet hours; close the windows; use soft music
    I feel alone in a new city; join a club; visit the library; greet your neighbors; call old friends
    I want to run but I am not fit; start with walking; run slowly; rest every second day; get good shoes
    my bread is too hard; use more water; let the dough rest longer; bake it for a shorter time; cover it
    """)  # noqa: E501
}

SYLLABLES = listed("ba bel dor fen gra hol ka lan lor mer mo nil o pel ra ri sa sol ta tor u ve vin wen za zu")
LANDSCAPES = listed("river lake forest mountain desert coast valley island hill swamp")
DIRECTIONS = listed("north south east west")
INVENTED_KINDS = listed("bird fish lizard fox beetle town village castle island flower tree festival dance soup")
COLORS = listed("red blue green white black yellow gray golden silver brown")
SIZES = listed("tiny small large huge")
FAME = ("its songs", "its old bridge", "its warm light", "its sweet smell", "its long history", "its bright colors",
        "its quiet nights", "its friendly nature", "its strange shape", "its winter feast")  # fmt: skip
EVENTS = ("birthday", "dinner", "concert", "picnic", "game night", "house party", "school play", "boat trip")
FAVORS = ("the book", "the flowers", "your help", "the lovely dinner", "the ride home", "the good advice", "the cake")
WEEKDAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
